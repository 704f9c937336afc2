//! What the operating system knows of processes. Unix only; what a system does not tell is `None`.

use std::time::Duration;

/// How a child ended and what it used, from `wait4` of that child alone.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// User and system time, with that of its own waited-for children.
    pub cpu: Duration,
    /// Largest resident set in bytes.
    pub peak_rss: u64,
}

/// Waits until the child has ended but leaves it to be collected, so that its number cannot be given away meanwhile.
pub fn wait_without_collecting(pid: u32) -> std::io::Result<()> {
    loop {
        let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: `info` is valid for a write of its type, and `pid` is a child of this process that nobody else collects.
        let rc = unsafe { libc::waitid(libc::P_PID, pid, info.as_mut_ptr(), libc::WEXITED | libc::WNOWAIT) };
        if rc == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Collects a child that has ended.
pub fn collect(pid: u32) -> std::io::Result<Ended> {
    let mut status = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are valid for writes of their types.
        let rc = unsafe { libc::wait4(pid as libc::pid_t, &mut status, 0, usage.as_mut_ptr()) };
        if rc >= 0 {
            break;
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: `wait4` succeeded and filled it; it was zeroed before.
    let usage = unsafe { usage.assume_init() };
    let time = |t: libc::timeval| Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64);
    // Linux counts in KiB, Apple in bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    Ok(Ended {
        code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
        signal: libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)),
        cpu: time(usage.ru_utime) + time(usage.ru_stime),
        peak_rss: usage.ru_maxrss as u64 * unit,
    })
}

/// Ends a process group which this process began with `process_group(0)`.
pub fn kill_group(pid: u32) {
    // SAFETY: a plain system call; `pid` is an own child that was not collected yet, so the number is still its.
    unsafe { libc::kill(-(pid as libc::pid_t), libc::SIGKILL) };
}

/// Processor time of a running process in nanoseconds.
#[cfg(target_os = "linux")]
pub fn cpu_ns(pid: u32) -> Option<u64> {
    let mut clock = 0;
    let mut time = std::mem::MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: both pointers are valid for writes of their types.
    let time = unsafe {
        if libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) != 0
            || libc::clock_gettime(clock, time.as_mut_ptr()) != 0
        {
            return None;
        }
        time.assume_init()
    };
    Some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Processor time of a running process in nanoseconds.
#[cfg(not(target_os = "linux"))]
pub fn cpu_ns(_: u32) -> Option<u64> {
    None
}

/// A line such as `VmRSS:` of `/proc/PID/status`, in bytes.
pub fn status_bytes(pid: u32, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Sets the high-water mark of a process back to what is resident now.
pub fn reset_peak_rss(pid: u32) {
    // A system without it leaves a larger mark, which the record shows; nothing to be done here.
    let _ = std::fs::write(format!("/proc/{pid}/clear_refs"), "5");
}

/// Load averages over 1, 5 and 15 minutes.
pub fn load() -> Option<[f64; 3]> {
    let mut load = [0.0; 3];
    // SAFETY: valid for writes of three doubles.
    (unsafe { libc::getloadavg(load.as_mut_ptr(), 3) } == 3).then_some(load)
}
