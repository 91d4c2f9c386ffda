//! How the ranks of a new communicator find each other: rank 0 opens a meeting point and tells the others over the
//! key-value store.

use std::fmt::Write;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::library::Nccl;
use super::sys::{UNIQUE_ID_BYTES, UniqueId};
use crate::collective::{Failure, Wait};
use crate::session::{KeyValue, StoreError};

/// Longest single wait for the key: then the cancel token is looked at.
const STORE_SLICE: Duration = Duration::from_millis(50);

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
    if rank == 0 {
        let id = nccl.unique_id()?;
        let meeting = Meeting {
            version: nccl.version().to_string(),
            id: to_hex(&id.0),
        };
        let text = serde_json::to_vec(&meeting).expect("a meeting has no map keys that could fail");
        store.put(&key, &text).map_err(refused)?;
        return Ok(id);
    }
    let meeting = read(&key, store, wait)?;
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

/// Waits in slices, since the store does not know the cancel token.
fn read(key: &str, store: &dyn KeyValue, wait: &Wait) -> Result<Meeting, Failure> {
    loop {
        let deadline = wait.deadline.min(Instant::now() + STORE_SLICE);
        match store.get(key, deadline) {
            Ok(bytes) => {
                return serde_json::from_slice(&bytes)
                    .map_err(|e| Failure::Invalid(format!("rank 0 published a malformed meeting: {e}")));
            }
            Err(StoreError::TimedOut { .. }) => wait.check(|| vec![0])?,
            Err(error) => return Err(refused(error)),
        }
    }
}

fn refused(error: StoreError) -> Failure {
    match error {
        StoreError::Superseded(cause) => Failure::GenerationOver(cause),
        error => Failure::System {
            what: "exchanging the meeting point of NCCL".to_owned(),
            cause: error.to_string(),
        },
    }
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
