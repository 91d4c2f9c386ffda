//! What the driver says of all its devices, without making a context on any.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use cudarc::driver::sys::{CUdevice, CUdevice_P2PAttribute as Peer};
use serde::{Deserialize, Serialize};

use super::GpuFacts;
use super::calls::{self, written};
use super::driver::{count_devices, device_of, driver_error};
use super::facts::facts_of;
use crate::device::DeviceError;

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
        let devices = (0..count).map(|ordinal| {
            device_of(ordinal).map_err(|error| driver_error(format!("cannot see GPU {ordinal}"), error))
        });
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let facts = |device: &CUdevice| {
            facts_of(*device).map_err(|error| driver_error("cannot describe a GPU".to_owned(), error))
        };
        let row = |from: &CUdevice| devices.iter().map(|to| reach(*from, *to)).collect();
        Ok(Self {
            gpus: devices.iter().map(facts).collect::<Result<_, _>>()?,
            reach: devices.iter().map(row).collect(),
        })
    }
}

/// What the driver does not say counts as not there.
fn reach(from: CUdevice, to: CUdevice) -> Reach {
    if from == to {
        return Reach::Itself;
    }
    let says = |attribute| {
        // SAFETY: both devices were given by the driver; the function writes one integer.
        let said = written(0, |value| unsafe {
            calls::device_reach(value, attribute, from, to)
        });
        said.is_ok_and(|value| value != 0)
    };
    if !says(Peer::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED) {
        Reach::Host
    } else if says(Peer::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED) {
        Reach::NvLink
    } else {
        Reach::Pcie
    }
}
