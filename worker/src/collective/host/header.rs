//! An operation as 64 bytes, which every peer compares with its own.

use std::fmt;

use crate::collective::error::Failure;
use crate::collective::operation::{Operation, ReduceOp, Request, Traffic};
use crate::device::DType;

/// Size of a header, in a segment and on a connection.
pub(super) const HEADER_BYTES: usize = 64;

/// First half of every header: no other protocol has it, and no build with another format.
const MAGIC: u32 = 0x6464_7001;

/// Words that must be the same on all ranks; the others may differ.
const COMMON_WORDS: usize = 4;

/// Collective calls that are not operations of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SetUpCall {
    /// `alloc_shared` of so many elements.
    Allocation(DType, usize),
    /// `split`.
    Split,
}

/// Where the elements are, if peers can reach them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedAddress {
    /// Number of the shared arena; the same on all ranks.
    pub(super) arena: u64,
    /// Byte at which the buffer starts in it.
    pub(super) offset: u64,
}

/// One operation in 64 bytes:
///
/// | word | content |
/// |---|---|
/// | 0 | magic, operation, dtype, reduction, traffic |
/// | 1 | scale (as bits), root or receiver |
/// | 2 | number of the operation, low half of the arena where all must use the same |
/// | 3 | elements |
/// | 4, 5 | arena (0: private) and offset |
/// | 6, 7 | start of the tag |
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct OperationHeader([u64; 8]);

const CALLS: [&str; 8] = [
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "barrier",
    "send and recv",
    "shared allocation",
    "split",
];

impl OperationHeader {
    /// The header of a request of `rank`; `number` counts the group's collectives, or the pair's messages.
    pub(super) fn of(request: &Request, rank: usize, number: u64, address: Option<SharedAddress>) -> Self {
        let (call, peer) = match request.operation {
            Operation::AllReduce => (0, 0),
            Operation::ReduceScatter => (1, 0),
            Operation::AllGather => (2, 0),
            Operation::Broadcast { root } => (3, root),
            Operation::Barrier => (4, 0),
            Operation::Send { to } => (5, to),
            Operation::Recv { .. } => (5, rank),
        };
        let (reduce, scale) = match request.reduce {
            _ if call > 1 => (0, 0),
            ReduceOp::Sum { scale } => (0, scale.to_bits()),
            ReduceOp::Max => (1, 0),
        };
        let dtype = if call == 4 {
            0
        } else {
            dtype_code(request.buffer.dtype())
        };
        let traffic = match request.traffic {
            Traffic::Grads => 0,
            Traffic::Params => 1,
            Traffic::Other => 2,
        };
        let mut header = Self::pack(
            [call, dtype, reduce, traffic],
            scale,
            peer,
            number,
            request.buffer.len(),
        );
        if let Some(SharedAddress { arena, offset }) = address {
            (header.0[4], header.0[5]) = (arena, offset);
        }
        header.set_tag(&request.tag);
        header
    }

    /// The same, for ranks that must all use the same shared arena, or all none.
    pub(super) fn with_common_arena(mut self) -> Self {
        self.0[2] |= self.0[4] << 32;
        self
    }

    /// The header of a collective call.
    pub(super) fn of_call(call: SetUpCall, number: u64, name: &str) -> Self {
        let mut header = match call {
            SetUpCall::Allocation(dtype, len) => Self::pack([6, dtype_code(dtype), 0, 0], 0, 0, number, len),
            SetUpCall::Split => Self::pack([7, 0, 0, 0], 0, 0, number, 0),
        };
        header.set_tag(name);
        header
    }

    fn pack(codes: [u8; 4], scale: u32, peer: usize, number: u64, elements: usize) -> Self {
        let codes = u32::from_le_bytes(codes);
        let word0 = u64::from(MAGIC) | u64::from(codes) << 32;
        let word1 = u64::from(scale) | (peer as u64) << 32;
        let word2 = u64::from(number as u32);
        Self([word0, word1, word2, elements as u64, 0, 0, 0, 0])
    }

    fn set_tag(&mut self, tag: &str) {
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(tag.bytes()) {
            *to = from;
        }
        self.0[6] = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        self.0[7] = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let mut words = [0; 8];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
        }
        Self(words)
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// An error unless the peer does the same.
    pub(super) fn agree(&self, theirs: &Self, global_rank: usize) -> Result<(), Failure> {
        if self.0[..COMMON_WORDS] == theirs.0[..COMMON_WORDS] {
            return Ok(());
        }
        Err(Failure::Mismatch {
            rank: global_rank,
            ours: self.to_string(),
            theirs: theirs.to_string(),
        })
    }

    /// Where the elements are, if they are in a shared arena.
    pub(super) fn address(&self) -> Option<SharedAddress> {
        let [.., arena, offset, _, _] = self.0;
        (arena != 0).then_some(SharedAddress { arena, offset })
    }
}

impl fmt::Display for OperationHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [word0, word1, word2, elements, ..] = self.0;
        let (number, arena) = (word2 as u32, word2 >> 32);
        if word0 as u32 != MAGIC {
            return f.write_str("something that is not an operation of this build");
        }
        let [call, dtype, reduce, traffic] = ((word0 >> 32) as u32).to_le_bytes();
        let name = CALLS.get(usize::from(call)).unwrap_or(&"an unknown operation");
        write!(f, "{name} #{number}")?;
        if matches!(call, 3 | 5) {
            write!(
                f,
                " {} rank {}",
                if call == 3 { "from" } else { "to" },
                word1 >> 32
            )?;
        }
        if !matches!(call, 4 | 7) {
            write!(f, " of {elements} {}", dtype_name(dtype))?;
        }
        match (call, reduce) {
            (0 | 1, 0) => write!(f, ", sum scaled by {}", f32::from_bits(word1 as u32))?,
            (0 | 1, _) => f.write_str(", max")?,
            _ => {}
        }
        if call < 6 {
            let purpose = ["gradients", "parameters", "other"].get(usize::from(traffic));
            write!(f, ", traffic {}", purpose.unwrap_or(&"unknown"))?;
        }
        if arena != 0 {
            write!(f, ", in shared arena {arena:08x}")?;
        }
        let tag: Vec<u8> = self.0[6..].iter().flat_map(|word| word.to_le_bytes()).collect();
        let tag = String::from_utf8_lossy(&tag);
        write!(f, " ({})", tag.trim_end_matches('\0'))
    }
}

const DTYPES: [DType; 5] = [DType::F64, DType::F32, DType::Bf16, DType::I32, DType::U8];

fn dtype_code(dtype: DType) -> u8 {
    DTYPES
        .iter()
        .position(|&d| d == dtype)
        .expect("every type is listed") as u8
}

fn dtype_name(code: u8) -> String {
    DTYPES
        .get(usize::from(code))
        .map_or_else(|| "unknown elements".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_its_bytes_and_says_what_it_is() {
        let header = OperationHeader::of_call(SetUpCall::Allocation(DType::Bf16, 12), 3, "gradients");
        let decoded = OperationHeader::decode(&header.encode());
        assert!(decoded == header);
        assert_eq!(header.to_string(), "shared allocation #3 of 12 bf16 (gradients)");
    }

    #[test]
    fn a_difference_names_both() {
        let ours = OperationHeader::of_call(SetUpCall::Allocation(DType::F32, 12), 3, "gradients");
        let theirs = OperationHeader::of_call(SetUpCall::Split, 3, "tensor");
        let error = ours.agree(&theirs, 7).unwrap_err();
        assert!(error.to_string().starts_with(
            "rank 7 is in split #3 (tensor), this rank in shared allocation #3 of 12 f32 (gradients)"
        ));
    }
}
