//! What the driver says of one device, without a context on it.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute as Attribute};
use serde::{Deserialize, Serialize};

use super::Arch;
use super::calls::{self, DriverError, written};
use crate::device::DeviceError;

/// Bytes of a device's name with its final zero.
const NAME_BYTES: usize = 128;

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
    /// Where it is plugged in; empty if the driver does not say.
    pub pci: String,
}

impl GpuFacts {
    /// What its kernels are compiled for.
    #[must_use]
    pub const fn arch(&self) -> Arch {
        let (major, minor) = self.compute_capability;
        Arch::of_capability(major, minor)
    }

    /// An error if it is older than what kernels are written for. `ordinal` is its number among the visible ones.
    pub fn expect_served(&self, ordinal: usize) -> Result<(), DeviceError> {
        let arch = self.arch();
        if arch >= Arch::OLDEST {
            return Ok(());
        }
        Err(DeviceError::TooOld {
            device: format!("GPU {ordinal} ({})", self.name),
            arch: arch.to_string(),
            oldest: Arch::OLDEST.to_string(),
        })
    }
}

/// Those of a device that the driver has given.
pub(super) fn facts_of(device: CUdevice) -> Result<GpuFacts, DriverError> {
    let number = |which| {
        // SAFETY: the driver knows the device; the function writes one integer.
        let value = written(0, |value| unsafe {
            calls::device_attribute(value, which, device)
        });
        value.map(|value| value.max(0) as u32)
    };
    let name = text::<NAME_BYTES>(|to, bytes| {
        // SAFETY: the function writes at most so many bytes, the last of them a zero.
        unsafe { calls::device_name(to, bytes, device) }
    });
    let pci = text::<PCI_BYTES>(|to, bytes| {
        // SAFETY: as above.
        unsafe { calls::device_pci(to, bytes, device) }
    });
    let shared = number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    Ok(GpuFacts {
        name: name?,
        compute_capability: (
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        // SAFETY: the driver knows the device; the function writes one number.
        memory_bytes: written(0, |bytes| unsafe { calls::device_memory(bytes, device) })?,
        multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: shared? as usize,
        pci: pci.unwrap_or_default(),
    })
}

/// What a function writes into room for so many bytes.
fn text<const BYTES: usize>(
    write: impl FnOnce(*mut c_char, c_int) -> Result<(), DriverError>,
) -> Result<String, DriverError> {
    let mut bytes = [0_u8; BYTES];
    write(bytes.as_mut_ptr().cast(), BYTES as c_int)?;
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
