//! How the ranks of a new communicator find each other: rank 0 opens a meeting point and tells the others over the
//! key-value store.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::library::Nccl;
use super::sys::{UNIQUE_ID_BYTES, UniqueId};
use crate::collective::lookup::Lookup;
use crate::collective::{Failure, Wait};
use crate::session::KeyValue;

/// What rank 0 tells.
#[derive(Debug, Serialize, Deserialize)]
struct Meeting {
    /// Of its library.
    version: String,
    /// In hexadecimal.
    id: String,
}

/// The meeting point of all ranks: made by rank 0, learned by the others.
pub(super) fn meet(
    nccl: &Nccl,
    name: &str,
    rank: usize,
    store: &dyn KeyValue,
    wait: &Wait,
) -> Result<UniqueId, Failure> {
    let key = format!("nccl/{name}/meeting");
    let lookup = Lookup {
        store,
        wait,
        what: "exchanging the meeting point of NCCL",
    };
    if rank == 0 {
        let id = nccl.unique_id()?;
        let meeting = Meeting {
            version: nccl.version().to_string(),
            id: to_hex(&id.0),
        };
        let text = serde_json::to_vec(&meeting).expect("a meeting has no map keys that could fail");
        lookup.tell(&key, &text)?;
        return Ok(id);
    }
    let bytes = lookup.await_key(&key, || vec![0])?;
    let meeting: Meeting = serde_json::from_slice(&bytes)
        .map_err(|e| Failure::Invalid(format!("rank 0 published a malformed meeting: {e}")))?;
    let own = nccl.version().to_string();
    if meeting.version != own {
        return Err(Failure::Invalid(format!(
            "rank 0 has NCCL {}, this rank NCCL {own} (`{}`)\n  hint: install the same version on all nodes",
            meeting.version,
            nccl.path().display()
        )));
    }
    from_hex(&meeting.id)
        .map(UniqueId)
        .ok_or_else(|| Failure::Invalid("rank 0 published a malformed meeting point of NCCL".into()))
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}

fn from_hex(text: &str) -> Option<[u8; UNIQUE_ID_BYTES]> {
    if text.len() != 2 * UNIQUE_ID_BYTES || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; UNIQUE_ID_BYTES];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(bytes)
}
