//! The header of a safetensors file: which tensors it holds, and where.

use std::fs::File;
use std::io::{self, Read as _};

use safetensors::tensor::Metadata;

/// Bytes before the header: its length.
pub(super) const LENGTH_BYTES: usize = 8;
/// Longest header that is read; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What a file says of itself.
pub(crate) struct Header {
    /// Names, types, shapes, and bytes from [`Header::data`] on; without gaps, and each as long as type and shape say.
    pub(crate) metadata: Metadata,
    /// Where the data begins, in bytes.
    pub(crate) data: u64,
}

/// Why there is none.
pub(crate) enum HeaderError {
    /// The system refused.
    Io(io::Error),
    /// In words.
    Damaged(String),
}

impl From<io::Error> for HeaderError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads the header of a safetensors file from its start. Whether the data is there is left to the caller.
pub(crate) fn read_header(file: &mut File) -> Result<Header, HeaderError> {
    let mut length = [0; LENGTH_BYTES];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(HeaderError::Damaged(format!("its header claims {length} bytes")));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json)?;
    let metadata =
        serde_json::from_slice(&json).map_err(|e| HeaderError::Damaged(format!("its header: {e}")))?;
    Ok(Header {
        metadata,
        data: LENGTH_BYTES as u64 + length,
    })
}
