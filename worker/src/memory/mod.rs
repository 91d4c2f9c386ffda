//! Memory of devices, and what orders its use: what operations are written on. No operation is known here.
//!
//! | type | what it is |
//! |---|---|
//! | [`Arena`], [`Buffer`], [`ArenaSpec`] | flat memory of one type, ranges of it, what to allocate |
//! | [`DType`], [`Element`] | types of elements, and bf16 |
//! | [`Event`], [`Signal`] | points in streams; facts of the host |
//! | [`Fetch`] | bytes on their way to the host |
//! | [`HostMemory`] | private pages or a memfd segment |
//! | [`FileMemory`] | a mapped file without a name |
//! | [`DeviceError`] | what can go wrong on a device |

mod arena;
pub(crate) mod dtype;
mod error;
mod event;
mod host;

pub use arena::{Arena, ArenaSpec, Buffer, Held, HostMut, HostRef, Sharing};
pub use dtype::{DType, Element};
pub use error::{DeviceError, Result};
pub use event::{Event, EventState, Fetch, Signal};
pub use host::{FileMemory, HostMemory, Memory};
