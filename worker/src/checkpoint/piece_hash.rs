//! BLAKE3 of a piece, and of its blocks: who reads a part of a piece verifies the blocks of that part only.
//!
//! BLAKE3 is a tree over the bytes. The hash of a block is the node above it, and the hash of the piece the root above all
//! of them, so that every byte is hashed once for both.

use blake3::hazmat::{
    ChainingValue, HasherExt as _, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};
use blake3::{Hash, Hasher};

use super::manifest::RangeRecord;

/// Bytes of a block: a power of two, so that each one is a subtree.
pub(super) const BLOCK_BYTES: u64 = 16 << 20;

/// The hashes of a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PieceHashes {
    pub(super) whole: Hash,
    /// Of each block; none where the piece is a single one.
    pub(super) blocks: Vec<ChainingValue>,
}

/// Hashes a piece from its first byte to its last.
pub(super) struct PieceHasher {
    /// Of the block whose turn it is.
    hasher: Hasher,
    /// Its bytes so far.
    filled: u64,
    /// Of those that are complete.
    blocks: Vec<ChainingValue>,
}

impl PieceHasher {
    pub(super) fn new() -> Self {
        Self {
            hasher: Hasher::new(),
            filled: 0,
            blocks: Vec::new(),
        }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            // Only when more follows: the last block is never empty, and a single one is the root itself.
            if self.filled == BLOCK_BYTES {
                self.end_block();
            }
            let here = (BLOCK_BYTES - self.filled).min(bytes.len() as u64);
            let (block, rest) = bytes.split_at(here as usize);
            self.hasher.update(block);
            self.filled += here;
            bytes = rest;
        }
    }

    /// The hashes; the next piece begins.
    pub(super) fn finish(&mut self) -> PieceHashes {
        let mut done = std::mem::replace(self, Self::new());
        if done.blocks.is_empty() {
            return PieceHashes {
                whole: done.hasher.finalize(),
                blocks: Vec::new(),
            };
        }
        done.end_block();
        PieceHashes {
            whole: root(&done.blocks),
            blocks: done.blocks,
        }
    }

    fn end_block(&mut self) {
        self.blocks.push(self.hasher.finalize_non_root());
        self.hasher = block_hasher(self.blocks.len());
        self.filled = 0;
    }
}

/// Block `index` of a piece of several.
fn block_hasher(index: usize) -> Hasher {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(index as u64 * BLOCK_BYTES);
    hasher
}

/// The piece that has these blocks, of which there are two or more.
fn root(blocks: &[ChainingValue]) -> Hash {
    let (left, right) = children(blocks);
    merge_subtrees_root(&node(left), &node(right), Mode::Hash)
}

fn node(blocks: &[ChainingValue]) -> ChainingValue {
    if let [block] = blocks {
        return *block;
    }
    let (left, right) = children(blocks);
    merge_subtrees_non_root(&node(left), &node(right), Mode::Hash)
}

/// The last block counts as a full one: a shorter one is in the same place of the tree.
fn children(blocks: &[ChainingValue]) -> (&[ChainingValue], &[ChainingValue]) {
    let left = left_subtree_len(blocks.len() as u64 * BLOCK_BYTES) / BLOCK_BYTES;
    blocks.split_at(left as usize)
}

/// Where one block of a piece lies, from the piece's first byte, and how its hash is made.
pub(super) struct Block {
    pub(super) bytes: std::ops::Range<u64>,
    hasher: Hasher,
    is_root: bool,
}

impl Block {
    /// Blocks of a piece of so many bytes, as its record has hashes of them: one where it has none.
    pub(super) fn count(piece: &RangeRecord) -> usize {
        piece.blocks.len().max(1)
    }

    /// Blocks that hold bytes of a range that is not empty.
    pub(super) fn holding(piece: &RangeRecord, range: &std::ops::Range<u64>) -> std::ops::Range<usize> {
        if piece.blocks.is_empty() {
            return 0..1;
        }
        (range.start / BLOCK_BYTES) as usize..range.end.div_ceil(BLOCK_BYTES) as usize
    }

    /// Block `index` of a piece of so many bytes.
    pub(super) fn of(piece: &RangeRecord, bytes: u64, index: usize) -> Self {
        let is_root = piece.blocks.is_empty();
        let start = index as u64 * BLOCK_BYTES;
        let end = if is_root {
            bytes
        } else {
            bytes.min(start + BLOCK_BYTES)
        };
        Self {
            bytes: start..end,
            hasher: block_hasher(index),
            is_root,
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// Its hash, as a record has it.
    pub(super) fn hash(&self) -> Hash {
        if self.is_root {
            self.hasher.finalize()
        } else {
            Hash::from_bytes(self.hasher.finalize_non_root())
        }
    }
}

/// True if a record's hashes of blocks, if it has some, make up its hash of a piece of so many bytes.
pub(super) fn agree(piece: &RangeRecord, bytes: u64) -> bool {
    if piece.blocks.is_empty() {
        return true;
    }
    let blocks: Option<Vec<ChainingValue>> = piece
        .blocks
        .iter()
        .map(|hex| Some(*Hash::from_hex(hex).ok()?.as_bytes()))
        .collect();
    blocks.is_some_and(|blocks| {
        blocks.len() > 1
            && blocks.len() as u64 == bytes.div_ceil(BLOCK_BYTES)
            && root(&blocks).to_hex().as_str() == piece.blake3
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_piece_is_that_of_its_bytes_whatever_its_blocks() {
        let block = BLOCK_BYTES as usize;
        let bytes: Vec<u8> = (0..5 * block + 3).map(|i| (i * i / 7) as u8).collect();
        let mut hasher = PieceHasher::new();
        for (len, blocks) in [
            (0, 0),
            (1, 0),
            (block, 0),
            (block + 1, 2),
            (2 * block, 2),
            (3 * block - 1, 3),
            (4 * block, 4),
            (5 * block + 3, 6),
        ] {
            for part in bytes[..len].chunks(3_000_017) {
                hasher.update(part);
            }
            let found = hasher.finish();
            assert_eq!(found.whole, blake3::hash(&bytes[..len]), "{len} bytes");
            assert_eq!(found.blocks.len(), blocks, "{len} bytes");
        }
    }
}
