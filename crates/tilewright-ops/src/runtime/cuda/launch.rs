//! Launches: which kernel, how many blocks, which arguments; and what an error says of them.

use std::ffi::c_void;

use tilewright_core::{DType, Result};

use super::Cuda;
use super::driver::{self, Address};
use super::source::{self, Source, Values};
use crate::Tensor;

/// One kernel in one variant.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub(super) source: &'static Source,
    pub(super) entry: &'static str,
    pub(super) values: Values,
}

impl Kernel {
    /// Whether it is the variant with these values.
    pub(crate) fn is(&self, values: &[i64]) -> bool {
        self.values[..values.len()] == *values
    }
}

impl Source {
    /// The kernel `entry` with these values of the source's parameters.
    pub(crate) fn kernel(&'static self, entry: &'static str, values: &[i64]) -> Kernel {
        debug_assert!(self.variants.contains(&values), "{} {values:?} is not in the table of variants", self.name);
        let mut all = [0; 4];
        all[..values.len()].copy_from_slice(values);
        Kernel { source: self, entry, values: all }
    }

    /// The kernel for a storage type, of a source whose only parameter that is.
    pub(crate) fn typed(&'static self, entry: &'static str, dtype: DType) -> Kernel {
        self.kernel(entry, &[source::code(dtype)])
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    /// A tensor's address.
    Tensor(&'a Tensor),
    /// A tensor's address, or null.
    Maybe(Option<&'a Tensor>),
    /// A bare address.
    Address(Address),
    /// `int`.
    Int(i32),
    /// `long long`.
    Long(i64),
    /// `float`.
    Float(f32),
}

impl Arg<'_> {
    fn bits(&self) -> u64 {
        match *self {
            Arg::Tensor(t) => t.cuda_address(),
            Arg::Maybe(t) => t.map_or(0, Tensor::cuda_address),
            Arg::Address(a) => a,
            Arg::Int(i) => u64::from(i as u32),
            Arg::Long(i) => i as u64,
            Arg::Float(f) => u64::from(f.to_bits()),
        }
    }

    fn words(&self) -> String {
        match *self {
            Arg::Tensor(t) | Arg::Maybe(Some(t)) => format!("{} {}", t.dtype(), t.shape()),
            Arg::Maybe(None) => "none".to_owned(),
            Arg::Address(a) => format!("{a:#x}"),
            Arg::Int(i) => i.to_string(),
            Arg::Long(i) => i.to_string(),
            Arg::Float(f) => f.to_string(),
        }
    }
}

impl Cuda {
    /// Launches `grid` blocks of `threads` threads. An empty grid is no work.
    pub(crate) fn launch(
        &self,
        op: &'static str,
        kernel: &Kernel,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        args: &[Arg<'_>],
    ) -> Result<()> {
        self.launch_as(op, kernel, grid, threads, shared, (&[], args), false)
    }

    /// The same for a kernel that may begin before what was launched in front of it has ended: it touches nothing of it before `griddepcontrol.wait`.
    pub(crate) fn launch_early(
        &self,
        op: &'static str,
        kernel: &Kernel,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        args: &[Arg<'_>],
    ) -> Result<()> {
        // Before Hopper there is no such launch.
        self.launch_as(op, kernel, grid, threads, shared, (&[], args), self.info.capability.0 >= 9)
    }

    /// The same for a kernel of 256 threads whose first parameter is a struct, given by its words.
    pub(crate) fn launch_with(
        &self,
        op: &'static str,
        kernel: &Kernel,
        blocks: usize,
        table: &[Arg<'_>],
        args: &[Arg<'_>],
    ) -> Result<()> {
        self.launch_as(op, kernel, [blocks, 1, 1], 256, 0, (table, args), false)
    }

    /// `table`: the words of a struct that is the first parameter, or none.
    #[allow(clippy::too_many_arguments)]
    fn launch_as(
        &self,
        op: &'static str,
        kernel: &Kernel,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        (table, args): (&[Arg<'_>], &[Arg<'_>]),
        early: bool,
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        self.enter();
        let function = self.function(op, kernel)?;
        if shared > 40 << 10 {
            // More than 48 KB, a kernel's own arrays included, must be asked for; what the chip does not have is refused by the launch.
            // SAFETY: the function belongs to a loaded module.
            unsafe { (self.driver.function_set)(function, driver::MAX_DYNAMIC_SHARED, shared as i32) };
        }
        const MOST: usize = 160;
        debug_assert!(table.len() + args.len() <= MOST, "{op} passes {} words", table.len() + args.len());
        let mut slots = [0u64; MOST];
        let mut pointers = [std::ptr::null_mut::<c_void>(); MOST];
        for (slot, arg) in slots.iter_mut().zip(table.iter().chain(args)) {
            *slot = arg.bits();
        }
        // The struct's bytes are read from the place of its first word on.
        let starts = (0..usize::from(!table.is_empty())).chain(table.len()..table.len() + args.len());
        for (pointer, at) in pointers.iter_mut().zip(starts) {
            *pointer = std::ptr::from_mut(&mut slots[at]).cast();
        }
        let [x, y, z] = grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        // SAFETY: the arguments are those of the kernel's declaration beside the caller; each slot holds at least as many bytes as its type,
        // little-endian; the driver copies them before it returns.
        let status = unsafe {
            let none = std::ptr::null_mut();
            let (threads, shared) = (threads as u32, shared as u32);
            if early {
                let mut attribute = driver::LaunchAttribute::early();
                let config = driver::LaunchConfig {
                    grid: [x, y, z],
                    block: [threads, 1, 1],
                    shared,
                    stream: self.stream,
                    attributes: &raw mut attribute,
                    count: 1,
                };
                (self.driver.launch_with)(&raw const config, function, pointers.as_mut_ptr(), none)
            } else {
                (self.driver.launch)(function, x, y, z, threads, 1, 1, shared, self.stream, pointers.as_mut_ptr(), none)
            }
        };
        self.launches.set(self.launches.get() + 1);
        let describe = || {
            let args: Vec<String> = args.iter().map(Arg::words).collect();
            let Kernel { source, entry, values, .. } = kernel;
            format!(
                "{} {entry} {values:?}, grid {grid:?}, {threads} threads, {shared} bytes shared, on ({})",
                source.name,
                args.join(", ")
            )
        };
        if status != 0 {
            return self.check(op, &format!("cuLaunchKernel of {}", describe()), status);
        }
        self.after_launch(op, describe)
    }

    /// With `TILEWRIGHT_CUDA_CAREFUL`, waits, so that a fault names its launch.
    pub(super) fn after_launch(&self, op: &'static str, describe: impl FnOnce() -> String) -> Result<()> {
        if self.careful && !self.recording() {
            // SAFETY: the stream lives as long as `self`.
            let status = unsafe { (self.driver.stream_synchronize)(self.stream) };
            if status != 0 {
                return self.check(op, &format!("waiting for {}", describe()), status);
            }
        }
        Ok(())
    }
}

/// Whether all of these start at a multiple of 16 bytes, which packs need.
pub(crate) fn aligned(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|t| t.cuda_address().is_multiple_of(16))
}

/// Elements of one pack of 16 bytes.
pub(crate) fn pack(dtype: DType) -> usize {
    16 / dtype.size()
}
