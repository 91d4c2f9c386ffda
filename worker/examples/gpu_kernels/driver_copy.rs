//! The driver's own copy within a card: a ceiling that owes nothing to a kernel of ours.
#![allow(unsafe_code, reason = "a function of the CUDA driver is called")]

use std::ffi::{c_int, c_void};

use ddp_worker::device::{Buffer, CudaDevice, DeviceError, Stream};
use ddp_worker::libraries::{Library, LibraryKind};

/// Target, source, bytes, stream.
type CopyWithin = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> c_int;

/// See the module.
pub(crate) struct DriverCopy(CopyWithin);

impl DriverCopy {
    /// Finds it in the driver.
    pub(crate) fn load() -> Result<Self, DeviceError> {
        let driver = Library::open(LibraryKind::Cuda)?;
        // SAFETY: the signature is that of the driver's public header; libraries are never closed.
        Ok(Self(unsafe { driver.function("cuMemcpyDtoDAsync_v2") }?))
    }

    /// Copies all of `from` to `to`, in stream order.
    ///
    /// # Panics
    /// If their sizes differ.
    pub(crate) fn enqueue(
        &self,
        device: &CudaDevice,
        stream: Stream,
        from: &Buffer,
        to: &Buffer,
    ) -> Result<(), DeviceError> {
        assert_eq!(from.bytes(), to.bytes());
        let (source, target) = (device.address(from)?.raw(), device.address(to)?.raw());
        device.context().bind()?;
        // SAFETY: both are memory of this device of so many bytes, and only this stream uses them.
        let status = unsafe { (self.0)(target, source, from.bytes(), device.raw_stream(stream)?.cast()) };
        if status == 0 {
            return Ok(());
        }
        Err(DeviceError::Driver {
            doing: "cannot copy within the device".to_owned(),
            cause: format!("error {status} of the driver"),
            hint: "`ddp-train doctor` shows what it can do".to_owned(),
        })
    }
}
