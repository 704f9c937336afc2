//! `--device`: where the work runs.

use std::str::FromStr;

use tilewright_core::{Error, Result};
use tilewright_ops::Device;

/// A device by name, not opened yet.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum DeviceName {
    /// This computer's processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU by its number.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = match text {
            "cpu" => return Ok(DeviceName::Cpu),
            "cuda" => Some(0),
            other => other.strip_prefix("cuda:").and_then(|n| n.parse().ok()),
        };
        number.map(DeviceName::Cuda).ok_or_else(|| {
            Error::config(format!("there is no device `{text}`"), "use cpu, cuda, or cuda:1 for the second GPU")
        })
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl DeviceName {
    /// Opens it.
    ///
    /// # Errors
    /// What a GPU lacks, and how to get it.
    pub fn open(self) -> Result<Device> {
        match self {
            DeviceName::Cpu => Ok(Device::cpu()),
            DeviceName::Cuda(n) => Device::cuda(n),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for (text, name) in [("cpu", DeviceName::Cpu), ("cuda:0", DeviceName::Cuda(0)), ("cuda:3", DeviceName::Cuda(3))]
        {
            assert_eq!(text.parse::<DeviceName>().unwrap(), name);
            assert_eq!(name.to_string(), text);
        }
        assert_eq!("cuda".parse::<DeviceName>().unwrap(), DeviceName::Cuda(0));
    }

    #[test]
    fn other_names_are_refused_with_the_right_ones() {
        for text in ["", "gpu", "cuda:", "cuda:x", "CPU"] {
            let message = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(message.contains("use cpu, cuda"), "{message}");
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_cuda_says_how_to_get_it() {
        let message = DeviceName::Cuda(0).open().unwrap_err().to_string();
        assert!(message.contains("--features cuda"), "{message}");
    }
}
