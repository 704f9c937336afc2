//! Which GPUs there are, in an order of our own, and how one is opened.

use std::collections::HashSet;
use std::sync::{Mutex, OnceLock, PoisonError};

use cubecl::client::Client;
use cubecl_runtime::runtime::Runtime;
use cubecl_wgpu::{self as runtime, RuntimeOptions, WgpuBackend, WgpuDevice, WgpuDeviceKind, WgpuRuntime, wgpu};
use tilewright_core::{Error, Result};

/// The interface through which a GPU is reached.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Api {
    /// Vulkan: GPUs of every vendor on Linux and Windows.
    Vulkan,
    /// Metal: GPUs of Apple.
    Metal,
}

impl Api {
    /// The one for this system.
    pub fn here() -> Self {
        if cfg!(target_vendor = "apple") { Api::Metal } else { Api::Vulkan }
    }

    /// As in `--device`.
    pub fn name(self) -> &'static str {
        match self {
            Api::Vulkan => "vulkan",
            Api::Metal => "metal",
        }
    }

    /// Whether this build holds its compiler.
    fn is_built(self) -> bool {
        match self {
            Api::Vulkan => cfg!(feature = "vulkan"),
            Api::Metal => cfg!(feature = "metal") && cfg!(target_vendor = "apple"),
        }
    }

    fn backend(self) -> wgpu::Backend {
        match self {
            Api::Vulkan => wgpu::Backend::Vulkan,
            Api::Metal => wgpu::Backend::Metal,
        }
    }

    fn not_found(self) -> &'static str {
        match self {
            Api::Vulkan => {
                "install the vendor's driver with its Vulkan part and the loader (libvulkan.so.1, Debian's libvulkan1); `vulkaninfo --summary` should list the GPU"
            }
            Api::Metal => "Metal needs a Mac with an Apple GPU",
        }
    }
}

/// What kind of processor an adapter is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// With memory of its own.
    Discrete,
    /// Beside the processor, sharing its memory.
    Integrated,
    /// Of a virtual machine.
    Virtual,
    /// Not said.
    Other,
    /// A driver that computes on the processor: for tests, not for work.
    Software,
}

impl Kind {
    fn of(kind: wgpu::DeviceType) -> Self {
        match kind {
            wgpu::DeviceType::DiscreteGpu => Kind::Discrete,
            wgpu::DeviceType::IntegratedGpu => Kind::Integrated,
            wgpu::DeviceType::VirtualGpu => Kind::Virtual,
            wgpu::DeviceType::Cpu => Kind::Software,
            wgpu::DeviceType::Other => Kind::Other,
        }
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Discrete => "discrete GPU",
            Kind::Integrated => "integrated GPU",
            Kind::Virtual => "virtual GPU",
            Kind::Other => "GPU",
            Kind::Software => "software on the processor",
        }
    }
}

/// One adapter of the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Adapter {
    /// How it is reached.
    pub api: Api,
    /// Its number: discrete GPUs first, software last, then in the driver's order.
    pub number: usize,
    /// `NVIDIA H200`.
    pub name: String,
    /// Name and version of the driver.
    pub driver: String,
    /// What it is.
    pub kind: Kind,
    /// Its place among those of its kind.
    pub(super) nth: usize,
}

impl Adapter {
    /// Whether it computes on the processor: case tables are reduced there.
    pub fn is_software(&self) -> bool {
        self.kind == Kind::Software
    }

    fn device(&self) -> WgpuDevice {
        let kind = match self.kind {
            Kind::Discrete => WgpuDeviceKind::DiscreteGpu(self.nth),
            Kind::Integrated => WgpuDeviceKind::IntegratedGpu(self.nth),
            Kind::Virtual => WgpuDeviceKind::VirtualGpu(self.nth),
            Kind::Other => WgpuDeviceKind::Other(self.nth),
            Kind::Software => WgpuDeviceKind::Cpu,
        };
        WgpuDevice::new(kind).on(match self.api {
            Api::Vulkan => WgpuBackend::Vulkan,
            Api::Metal => WgpuBackend::Metal,
        })
    }
}

/// Held while adapters are listed or opened: a Vulkan loader may crash when instances come and go on several threads.
static OPENED: Mutex<Option<HashSet<WgpuDevice>>> = Mutex::new(None);

/// The adapters that this build can reach through `api`. Starts no device.
pub fn adapters(api: Api) -> Vec<Adapter> {
    let _opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    list(api)
}

fn list(api: Api) -> Vec<Adapter> {
    // One instance each for the life of the process.
    static INSTANCES: [OnceLock<wgpu::Instance>; 2] = [const { OnceLock::new() }; 2];
    if !api.is_built() {
        return Vec::new();
    }
    let instance = INSTANCES[api as usize].get_or_init(|| {
        let mut wanted = wgpu::InstanceDescriptor::new_without_display_handle();
        wanted.backends = api.backend().into();
        wgpu::Instance::new(wanted)
    });
    let found = cubecl::future::block_on(instance.enumerate_adapters(api.backend().into()));
    let mut adapters: Vec<Adapter> = Vec::new();
    for info in found.iter().map(wgpu::Adapter::get_info) {
        let kind = Kind::of(info.device_type);
        let nth = adapters.iter().filter(|a| a.kind == kind).count();
        // Of several software adapters the library can open the first only.
        if kind == Kind::Software && nth > 0 {
            continue;
        }
        let driver = format!("{} {}", info.driver, info.driver_info).trim().to_owned();
        adapters.push(Adapter { api, number: 0, name: info.name, driver, kind, nth });
    }
    adapters.sort_by_key(|a| (a.kind, a.nth));
    adapters.iter_mut().enumerate().for_each(|(number, a)| a.number = number);
    adapters
}

/// Opens an adapter, or takes the client it has.
pub(super) fn open(api: Api, number: usize) -> Result<(Adapter, Client)> {
    let name = api.name();
    if !api.is_built() {
        return Err(Error::config(
            format!("device {name}:{number}: this program was built without {name}"),
            format!("build with `--features {name}` on a system that has it, or use --device cpu"),
        ));
    }
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let found = list(api);
    let Some(adapter) = found.get(number).cloned() else {
        let there: Vec<_> = found.iter().map(|a| format!("{name}:{} {}", a.number, a.name)).collect();
        let (what, hint) = match found.is_empty() {
            true => (format!("no {name} adapter was found"), api.not_found().to_owned()),
            false => (format!("there is no {name} adapter {number}"), format!("choose one of {}", there.join(", "))),
        };
        return Err(Error::config(what, hint));
    };
    let device = adapter.device();
    let opened = opened.get_or_insert_default();
    if !opened.contains(&device) {
        let options = RuntimeOptions::default();
        let setup = match api {
            Api::Vulkan => runtime::try_init_setup::<runtime::Vulkan>(&device, options),
            Api::Metal => runtime::try_init_setup::<runtime::Metal>(&device, options),
        };
        setup.map_err(|error| {
            Error::config(
                format!("{name}:{number} ({}) cannot be opened: {error}", adapter.name),
                api.not_found().to_owned(),
            )
        })?;
        opened.insert(device.clone());
    }
    Ok((adapter, <WgpuRuntime as Runtime>::client(&device)))
}
