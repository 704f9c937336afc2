//! What machine code says of its kernels: parameters, limits, registers, shared memory. The sections are those that the driver reads.

use std::collections::HashMap;

/// A kernel by what a launch of it has to respect.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kernel {
    /// Bytes of each parameter.
    pub(crate) parameters: Vec<usize>,
    /// Threads of a block at most.
    pub(crate) most_threads: u32,
    pub(crate) registers: u32,
    /// Shared memory of its own arrays.
    pub(crate) shared: u32,
    /// Blocks of a cluster.
    pub(crate) cluster: [u32; 3],
}

fn word(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let mut all = [0; 8];
    all[..size].copy_from_slice(bytes.get(at..at + size)?);
    Some(u64::from_le_bytes(all))
}

fn name(strings: &[u8], at: usize) -> &str {
    let rest = strings.get(at..).unwrap_or_default();
    std::str::from_utf8(&rest[..rest.iter().position(|&b| b == 0).unwrap_or(rest.len())]).unwrap_or_default()
}

/// The kernels of an image; `None`: it is no machine code.
pub(crate) fn kernels(image: &[u8]) -> Option<HashMap<String, Kernel>> {
    if image.get(..4)? != b"\x7fELF" {
        return None;
    }
    let start = word(image, 0x28, 8)? as usize;
    let (size, count, names_at) =
        (word(image, 0x3a, 2)? as usize, word(image, 0x3c, 2)? as usize, word(image, 0x3e, 2)? as usize);
    let section = |i: usize| -> Option<(usize, u64, &[u8], u64)> {
        let at = start + i * size;
        let (kind, offset, bytes) = (word(image, at + 4, 4)?, word(image, at + 24, 8)?, word(image, at + 32, 8)?);
        // 8: takes no place in the file.
        let data = if kind == 8 { &[] } else { image.get(offset as usize..(offset + bytes) as usize)? };
        Some((word(image, at, 4)? as usize, bytes, data, word(image, at + 44, 4)?))
    };
    let strings = section(names_at)?.2;
    let mut all: HashMap<String, Kernel> = HashMap::new();
    for i in 0..count {
        let (at, bytes, data, info) = section(i)?;
        let section_name = name(strings, at);
        if let Some(kernel) = section_name.strip_prefix(".text.") {
            all.entry(kernel.to_owned()).or_default().registers = (info >> 24) as u32;
        } else if let Some(kernel) = section_name.strip_prefix(".nv.shared.") {
            all.entry(kernel.to_owned()).or_default().shared = bytes as u32;
        } else if let Some(kernel) = section_name.strip_prefix(".nv.info.") {
            attributes(data, all.entry(kernel.to_owned()).or_default());
        }
    }
    Some(all)
}

/// A list of attributes: how each is kept, which it is, and its value or the bytes of it.
fn attributes(data: &[u8], kernel: &mut Kernel) {
    const BYTES: u8 = 4;
    const PARAMETER: u8 = 0x17;
    const MAX_THREADS: u8 = 0x05;
    const CLUSTER: u8 = 0x3d;
    let mut at = 0;
    while let (Some(&[form, which]), Some(value)) = (data.get(at..at + 2), word(data, at + 2, 2)) {
        at += 4;
        if form != BYTES {
            continue;
        }
        let Some(bytes) = data.get(at..at + value as usize) else { return };
        at += value as usize;
        let word = |i: usize| word(bytes, 4 * i, 4).unwrap_or(0) as u32;
        match which {
            PARAMETER => {
                let (ordinal, size) = ((word(1) & 0xffff) as usize, (word(2) >> 18) as usize);
                kernel.parameters.resize(kernel.parameters.len().max(ordinal + 1), 0);
                kernel.parameters[ordinal] = size;
            }
            MAX_THREADS => kernel.most_threads = word(0) * word(1).max(1) * word(2).max(1),
            CLUSTER => kernel.cluster = [word(0), word(1), word(2)],
            _ => {}
        }
    }
}
