//! The run-time compiler: CUDA C++ text to machine code of one architecture.

use std::ffi::{CString, c_char, c_int, c_void};

use super::library::{self, Missing, functions};

type Status = c_int;
type Program = *mut c_void;

functions! {
    /// libnvrtc.
    struct Functions returns Status {
        version = "nvrtcVersion"(*mut c_int, *mut c_int);
        archs = "nvrtcGetNumSupportedArchs"(*mut c_int);
        arch_list = "nvrtcGetSupportedArchs"(*mut c_int);
        create = "nvrtcCreateProgram"(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        destroy = "nvrtcDestroyProgram"(*mut Program);
        compile = "nvrtcCompileProgram"(Program, c_int, *const *const c_char);
        log_size = "nvrtcGetProgramLogSize"(Program, *mut usize);
        log = "nvrtcGetProgramLog"(Program, *mut c_char);
        cubin_size = "nvrtcGetCUBINSize"(Program, *mut usize);
        cubin = "nvrtcGetCUBIN"(Program, *mut c_char);
    }
}

/// An opened NVRTC.
pub struct Nvrtc {
    functions: Functions,
    version: (i32, i32),
}

/// What a compilation gave.
pub struct Compiled {
    /// The machine code, an ELF file.
    pub image: Vec<u8>,
    /// What the compiler said: warnings, and with `--ptxas-options=-v` the resources of each kernel.
    pub log: String,
}

impl Nvrtc {
    /// Opens the library.
    pub fn open() -> Result<Self, Missing> {
        let functions = Functions::load(&library::NVRTC)?;
        let mut version = (0, 0);
        // SAFETY: two out-pointers.
        unsafe { (functions.version)(&mut version.0, &mut version.1) };
        Ok(Nvrtc { functions, version })
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.functions.path
    }

    /// The architectures that it can compile for, as 80 for `sm_80`.
    pub fn architectures(&self) -> Vec<i32> {
        let mut count = 0;
        // SAFETY: out-pointers of the documented sizes.
        unsafe { (self.functions.archs)(&mut count) };
        let mut list = vec![0; count.max(0) as usize];
        unsafe { (self.functions.arch_list)(list.as_mut_ptr()) };
        list
    }

    /// Compiles a text; the error is the compiler's log.
    pub fn compile(&self, name: &str, text: &str, options: &[String]) -> Result<Compiled, String> {
        let f = &self.functions;
        let c = |s: &str| CString::new(s).map_err(|_| format!("{name}: a NUL byte in the text or an option"));
        let (name_c, text_c) = (c(name)?, c(text)?);
        // From 13 on the compiler keeps a cache of its own through tables of the driver that are not documented, from whichever threads compile. Ours
        // (`source.rs`) is the only one needed.
        let without_cache = (self.version.0 >= 13).then_some("--no-cache");
        let options = options.iter().map(String::as_str).chain(without_cache).map(c).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: all strings and arrays outlive the calls; the program is destroyed on every path.
        unsafe {
            let null = std::ptr::null();
            let status = (f.create)(&mut program, text_c.as_ptr(), name_c.as_ptr(), 0, null, null);
            if status != 0 {
                return Err(format!("{name}: nvrtcCreateProgram gave status {status}"));
            }
            let status = (f.compile)(program, pointers.len() as c_int, pointers.as_ptr());
            let mut size = 0;
            (f.log_size)(program, &mut size);
            let mut log = vec![0u8; size];
            (f.log)(program, log.as_mut_ptr().cast());
            let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
            let result = if status == 0 {
                let mut size = 0;
                let status = (f.cubin_size)(program, &mut size);
                let mut image = vec![0u8; size];
                if status == 0 && (f.cubin)(program, image.as_mut_ptr().cast()) == 0 && size > 0 {
                    Ok(Compiled { image, log })
                } else {
                    Err(format!("{name}: NVRTC made no machine code; {log}"))
                }
            } else {
                Err(format!("{name}: nvrtcCompileProgram gave status {status}\n{log}"))
            };
            (f.destroy)(&mut program);
            result
        }
    }
}
