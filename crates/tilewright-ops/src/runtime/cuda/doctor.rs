//! What of CUDA is on this machine, in lines for people.

use std::ffi::c_int;

use super::driver::Driver;
use super::nvrtc::Nvrtc;
use super::{Info, cublaslt, library, source};

/// Facts, and advice where something is missing.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Name and value.
    pub rows: Vec<(&'static str, String)>,
    /// What to do.
    pub advice: Vec<String>,
}

/// Looks for the driver, its devices, NVRTC and cuBLASLt. Starts no context.
pub fn report() -> Report {
    let mut report = Report::default();
    match Driver::load(&library::DRIVER) {
        Ok(driver) => devices(&driver, &mut report),
        Err(missing) => lacks(&mut report, "cuda driver", &missing),
    }
    match Nvrtc::open() {
        Ok(nvrtc) => {
            let (major, minor) = nvrtc.version();
            report.rows.push(("cuda nvrtc", format!("{major}.{minor} ({})", nvrtc.path())));
        }
        Err(missing) => lacks(&mut report, "cuda nvrtc", &missing),
    }
    match cublaslt::version() {
        Ok((version, path)) => report.rows.push(("cuda cublaslt", format!("{version} ({path})"))),
        Err(missing) => lacks(&mut report, "cuda cublaslt", &missing),
    }
    let cache = source::cache_folder().map_or("none: set TILEWRIGHT_CACHE or HOME".into(), |p| p.display().to_string());
    report.rows.push(("cuda kernels", cache));
    report
}

fn lacks(report: &mut Report, name: &'static str, missing: &library::Missing) {
    report.rows.push((name, format!("not found ({})", missing.reason)));
    report.advice.push(format!("for --device cuda: {}", missing.hint));
}

fn devices(driver: &Driver, report: &mut Report) {
    let (mut version, mut count): (c_int, c_int) = (0, 0);
    // SAFETY: out-pointers.
    let status = unsafe {
        (driver.driver_version)(&mut version);
        match (driver.init)(0) {
            0 => (driver.device_count)(&mut count),
            status => status,
        }
    };
    report.rows.push(("cuda driver", format!("CUDA {}.{} ({})", version / 1000, version % 1000 / 10, driver.path)));
    if status != 0 || count == 0 {
        report.rows.push(("cuda devices", if status == 0 { "none".into() } else { driver.words(status) }));
        report
            .advice
            .push("for --device cuda: the driver finds no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES".into());
        return;
    }
    let mut found = Vec::new();
    for ordinal in 0..count {
        let mut id = 0;
        // SAFETY: an out-pointer.
        if unsafe { (driver.device_get)(&mut id, ordinal) } != 0 {
            continue;
        }
        let info = Info::read(driver, id);
        let (major, minor) = info.capability;
        let gib = info.memory_bytes as f64 / f64::from(1 << 30);
        let Info { name, multiprocessors, .. } = info;
        found.push(format!(
            "cuda:{ordinal} {name}, {gib:.1} GiB, capability {major}.{minor}, {multiprocessors} multiprocessors"
        ));
        if major < 8 {
            report
                .advice
                .push(format!("cuda:{ordinal} has capability {major}.{minor}; 8.0 is the oldest that is supported"));
        }
    }
    report.rows.push(("cuda devices", found.join("; ")));
}
