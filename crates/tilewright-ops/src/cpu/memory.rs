//! How much memory this machine has left, and how much this process uses.

/// Bytes that can be allocated without swapping: the smaller of the system's free memory and the limit of this process's control group.
/// Unlimited where the system does not say.
pub fn available() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let system = field_kib(&meminfo, "MemAvailable:").unwrap_or(u64::MAX);
    let read = |f: &str| std::fs::read_to_string(f).ok().and_then(|s| s.trim().parse::<u64>().ok());
    let group = match (read("/sys/fs/cgroup/memory.max"), read("/sys/fs/cgroup/memory.current")) {
        (Some(max), Some(current)) => max.saturating_sub(current),
        _ => u64::MAX,
    };
    system.min(group)
}

/// Resident bytes of this process: now and at its highest. `None` where the system does not say.
pub fn resident() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some((field_kib(&status, "VmRSS:")?, field_kib(&status, "VmHWM:")?))
}

fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_field_in_kib() {
        assert_eq!(field_kib("MemTotal: 5 kB\nMemAvailable:   1234 kB\n", "MemAvailable:"), Some(1234 * 1024));
        assert_eq!(field_kib("MemTotal: 5 kB\n", "MemAvailable:"), None);
    }
}
