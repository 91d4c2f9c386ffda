//! An operation as 64 bytes, which every peer compares with its own.

use std::fmt;

use bytemuck::{Pod, Zeroable, bytes_of};
use ddp_proto::printable;

use crate::collective::error::Failure;
use crate::collective::operation::{Operation, ReduceOp, Request};
use crate::device::DType;

/// Size of a header, in a segment and on a connection.
pub(super) const HEADER_BYTES: usize = 64;

/// First half of every header: no other protocol has it, and no build with another format.
const MAGIC: u32 = 0x6464_7003;

/// The first bytes must be the same on all ranks; the others may differ.
const COMMON_BYTES: usize = 32;

/// Collective calls that are not operations of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SetUpCall {
    /// `alloc_shared` of so many elements.
    Allocation(DType, usize),
    /// `split`.
    Split,
}

/// One operation, in the order of bytes of the machine: nodes of one job have the same.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct OperationHeader {
    magic: u32,
    /// Index in [`CALLS`].
    call: u8,
    dtype: u8,
    /// 0 for a sum, 1 for the maximum.
    reduce: u8,
    traffic: u8,
    reserved: u32,
    /// Root or receiver.
    peer: u32,
    /// Number of the operation; it wraps.
    number: u32,
    /// Low half of the arena where all must use the same.
    common_arena: u32,
    elements: u64,
    /// Number of the shared arena, the same on all ranks; 0 for private memory, which peers cannot reach.
    pub(super) arena: u64,
    /// Byte at which the buffer starts in it.
    pub(super) offset: u64,
    /// Start of the tag.
    tag: [u8; 16],
}

const _: () = assert!(size_of::<OperationHeader>() == HEADER_BYTES);

/// Index of the all-to-all.
const ALL_TO_ALL: u8 = 6;

const CALLS: [&str; 9] = [
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "barrier",
    "send and recv",
    "all-to-all",
    "shared allocation",
    "split",
];

/// By their number.
const DTYPES: [DType; 5] = [DType::F64, DType::F32, DType::Bf16, DType::I32, DType::U8];

impl OperationHeader {
    /// The header of a request of `rank`; `number` counts the group's collectives, or the pair's messages.
    pub(super) fn of(request: &Request, rank: usize, number: u64) -> Self {
        let (call, peer) = match request.operation {
            Operation::AllReduce(_) => (0, 0),
            Operation::ReduceScatter(_) => (1, 0),
            Operation::AllGather => (2, 0),
            Operation::Broadcast { root } => (3, root),
            Operation::Barrier => (4, 0),
            Operation::Send { to } => (5, to),
            Operation::Recv { .. } => (5, rank),
            Operation::AllToAll => (ALL_TO_ALL, 0),
        };
        let dtype = match request.operation {
            Operation::Barrier => 0,
            _ => request.buffer.dtype() as u8,
        };
        Self {
            call,
            dtype,
            reduce: u8::from(request.operation.reduction() == Some(ReduceOp::Max)),
            traffic: request.traffic as u8,
            peer: peer as u32,
            elements: request.buffer.len() as u64,
            ..Self::new(number, &request.tag)
        }
    }

    /// The header of a collective call.
    pub(super) fn of_call(call: SetUpCall, number: u64, name: &str) -> Self {
        let (call, dtype, elements) = match call {
            SetUpCall::Allocation(dtype, len) => (7, dtype as u8, len as u64),
            SetUpCall::Split => (8, 0, 0),
        };
        Self {
            call,
            dtype,
            elements,
            ..Self::new(number, name)
        }
    }

    fn new(number: u64, tag: &str) -> Self {
        let mut header = Self {
            magic: MAGIC,
            number: number as u32,
            ..Self::zeroed()
        };
        for (to, from) in header.tag.iter_mut().zip(tag.bytes()) {
            *to = from;
        }
        header
    }

    /// From here on all ranks must use the same shared arena, or all none.
    pub(super) fn require_common_arena(&mut self) {
        self.common_arena = self.arena as u32;
    }

    /// The header of an all-to-all with the length of the part that one peer gets. Other operations keep theirs.
    pub(super) fn with_part(mut self, bytes: usize) -> Self {
        if self.call == ALL_TO_ALL {
            self.elements = (bytes / DTYPES[usize::from(self.dtype)].bytes()) as u64;
        }
        self
    }

    /// An error unless the peer does the same.
    pub(super) fn agree(&self, theirs: &Self, global_rank: usize) -> Result<(), Failure> {
        if bytes_of(self)[..COMMON_BYTES] == bytes_of(theirs)[..COMMON_BYTES] {
            return Ok(());
        }
        Err(Failure::Mismatch {
            rank: global_rank,
            ours: self.to_string(),
            theirs: theirs.to_string(),
        })
    }
}

/// Compares the header of another rank with one of ours; the error is in words. For `tests/fuzz`.
pub(super) fn compare_foreign(bytes: &[u8; HEADER_BYTES]) -> Result<(), String> {
    let ours = OperationHeader::of_call(SetUpCall::Split, 3, "tensor");
    let theirs: OperationHeader = bytemuck::pod_read_unaligned(bytes);
    ours.agree(&theirs, 7).map_err(|failure| failure.to_string())
}

impl fmt::Display for OperationHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.magic != MAGIC {
            return f.write_str("something that is not an operation of this build");
        }
        let call = self.call;
        let name = CALLS.get(usize::from(call)).unwrap_or(&"an unknown operation");
        write!(f, "{name} #{}", self.number)?;
        match call {
            3 => write!(f, " from rank {}", self.peer)?,
            5 => write!(f, " to rank {}", self.peer)?,
            _ => {}
        }
        if !matches!(call, 4 | 8) {
            let part = if call == ALL_TO_ALL { " with a part" } else { "" };
            write!(f, "{part} of {} ", self.elements)?;
            match DTYPES.get(usize::from(self.dtype)) {
                Some(dtype) => write!(f, "{dtype}")?,
                None => f.write_str("unknown elements")?,
            }
        }
        match (call, self.reduce) {
            (0 | 1, 0) => f.write_str(", sum")?,
            (0 | 1, _) => f.write_str(", max")?,
            _ => {}
        }
        if call < 7 {
            let purposes = ["gradients", "parameters", "activations", "pipeline", "other"];
            let purpose = purposes.get(usize::from(self.traffic));
            write!(f, ", traffic {}", purpose.unwrap_or(&"unknown"))?;
        }
        if self.common_arena != 0 {
            write!(f, ", in shared arena {:08x}", self.common_arena)?;
        }
        let tag = String::from_utf8_lossy(&self.tag);
        write!(f, " ({})", printable::line(tag.trim_end_matches('\0')))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_its_bytes_and_says_what_it_is() {
        let header = OperationHeader::of_call(SetUpCall::Allocation(DType::Bf16, 12), 3, "gradients");
        let decoded: OperationHeader = *bytemuck::from_bytes(bytes_of(&header));
        assert!(decoded == header);
        assert_eq!(header.to_string(), "shared allocation #3 of 12 bf16 (gradients)");
    }

    #[test]
    fn a_difference_names_both() {
        let ours = OperationHeader::of_call(SetUpCall::Allocation(DType::F32, 12), 3, "gradients");
        let theirs = OperationHeader::of_call(SetUpCall::Split, 3, "tensor");
        let error = ours.agree(&theirs, 7).unwrap_err();
        assert!(error.to_string().starts_with(
            "rank 7 is in split #3 (tensor), but this rank is in shared allocation #3 of 12 f32 (gradients)"
        ));
    }
}
