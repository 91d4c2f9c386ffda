//! What the driver says of all its devices, without making a context on any.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{c_char, c_int};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_P2PAttribute as Peer, CUdevice_attribute as Attribute};
use serde::{Deserialize, Serialize};

use super::driver::{count_devices, driver_error};
use crate::device::DeviceError;

/// Bytes of a PCI address with its final zero: `0000:65:00.0`.
const PCI_BYTES: usize = 16;

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// `NVIDIA H200`
    pub name: String,
    /// Major and minor number, which kernels are compiled for.
    pub compute_capability: (u32, u32),
    /// All of its memory.
    pub memory_bytes: usize,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory of a block.
    pub shared_per_block: usize,
    /// Where it is plugged in.
    pub pci: String,
}

/// How one GPU reaches another's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reach {
    /// It is the same one.
    Itself,
    /// Directly, with atomic operations: a link of NVIDIA's own.
    NvLink,
    /// Directly, over PCI Express.
    Pcie,
    /// Only through the host's memory.
    Host,
}

/// All visible GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survey {
    /// In the order of their numbers.
    pub gpus: Vec<GpuFacts>,
    /// How the first reaches the second, by numbers.
    pub reach: Vec<Vec<Reach>>,
}

impl Survey {
    /// Asks the driver for all devices that `CUDA_VISIBLE_DEVICES` shows.
    pub fn take() -> Result<Self, DeviceError> {
        let count = count_devices()?;
        let devices = (0..count as c_int).map(|ordinal| {
            result::device::get(ordinal)
                .map_err(|error| driver_error(format!("cannot see GPU {ordinal}"), error))
        });
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let row = |from: &sys::CUdevice| devices.iter().map(|to| reach(*from, *to)).collect();
        Ok(Self {
            gpus: devices
                .iter()
                .map(|device| facts(*device))
                .collect::<Result<_, _>>()?,
            reach: devices.iter().map(row).collect(),
        })
    }
}

fn facts(device: sys::CUdevice) -> Result<GpuFacts, DeviceError> {
    let failed = |error| driver_error("cannot describe a GPU".to_owned(), error);
    // SAFETY: the device was given by the driver.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map_err(failed);
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok(GpuFacts {
        name: result::device::get_name(device).map_err(failed)?,
        compute_capability: (major.max(0) as u32, minor.max(0) as u32),
        // SAFETY: as above.
        memory_bytes: unsafe { result::device::total_mem(device) }.map_err(failed)?,
        multiprocessors: multiprocessors.max(0) as u32,
        shared_per_block: shared.max(0) as usize,
        pci: pci_address(device),
    })
}

/// Empty if the driver does not say.
fn pci_address(device: sys::CUdevice) -> String {
    let mut bytes = [0_u8; PCI_BYTES];
    // SAFETY: the function writes at most so many bytes, the last of them a zero.
    let outcome =
        unsafe { sys::cuDeviceGetPCIBusId(bytes.as_mut_ptr().cast::<c_char>(), PCI_BYTES as c_int, device) };
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    outcome
        .result()
        .map_or(String::new(), |()| String::from_utf8_lossy(text).into_owned())
}

/// What the driver does not say counts as not there.
fn reach(from: sys::CUdevice, to: sys::CUdevice) -> Reach {
    if from == to {
        return Reach::Itself;
    }
    let says = |attribute| {
        let mut value = 0;
        // SAFETY: both devices were given by the driver; the function writes one integer.
        let outcome = unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, from, to) };
        outcome.result().is_ok() && value != 0
    };
    if !says(Peer::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED) {
        Reach::Host
    } else if says(Peer::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED) {
        Reach::NvLink
    } else {
        Reach::Pcie
    }
}
