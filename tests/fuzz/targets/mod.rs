//! What takes bytes from others, by who they come from.

pub(crate) mod agent;
pub(crate) mod files;
pub(crate) mod launch;
pub(crate) mod rendezvous;
pub(crate) mod worker;

/// Bytes as parts, each with its length in two bytes in front; the last one is what is left.
pub(crate) fn parts(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (part, rest) = rest.split_at(length);
        parts.push(part);
        bytes = rest;
    }
    parts
}

/// The other way round.
pub(crate) fn joined(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u16).to_le_bytes());
        bytes.extend(part);
    }
    bytes
}
