//! Messages from one rank to another: send and recv.
//!
//! Both ends announce the message and compare headers, so a send returns when its receiver has taken everything, and
//! two ranks that both send to each other first hear of it at once.
#![allow(unsafe_code, reason = "copies between a held buffer and a stage")]

use super::board::{PairGate, STAGE_BYTES, STAGES};
use super::flat::Flat;
use super::flow::{Script, Span};
use super::header::Header;
use super::moves::Moves;
use super::{Failure, Operation, Request, Wait};
use crate::device::Held;

/// What this rank counts about its messages with one other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pair {
    /// Messages, either way.
    messages: u64,
    /// Pieces sent through stages.
    put: u64,
    /// Pieces taken from the other's stages.
    taken: u64,
}

impl Flat {
    /// Sends or receives the request's buffer. Returns the bytes received.
    pub(super) fn message(
        &mut self,
        peer: usize,
        request: &Request,
        held: &mut Held,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        if peer == self.group.me() || peer >= self.group.size() {
            return Err(Failure::Invalid(format!(
                "rank {peer} is not another rank of this group"
            )));
        }
        let header = Header::of(request, self.group.me(), self.pairs[peer].messages, None);
        self.pairs[peer].messages += 1;
        let span = Span {
            start: held.host_ptr()?,
            len: request.buffer.bytes(),
        };
        let sends = matches!(request.operation, Operation::Send { .. });
        match self.group.neighbour(peer) {
            None => self.message_far(peer, sends, span, header, wait),
            Some(neighbour) => {
                self.announce(peer, neighbour, &header, wait)?;
                if sends {
                    // SAFETY: the span is that of a held buffer.
                    unsafe { self.put(peer, neighbour, span, wait) }
                } else {
                    // SAFETY: the span is that of a held buffer.
                    unsafe { self.take(peer, neighbour, span, wait) }
                }
            }
        }
    }

    fn message_far(
        &mut self,
        peer: usize,
        sends: bool,
        span: Span,
        header: Header,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let mut script = Script::header_only(peer);
        if sends {
            script.result_out = span;
        } else {
            script.result_in = span;
        }
        let mut moves = Moves::new(header);
        moves.scripts.push(script);
        // SAFETY: the span is that of a held buffer, which no neighbour touches.
        unsafe { self.run(moves, false, wait) }
    }

    /// Tells the other that this rank has come, waits for it, and compares headers.
    fn announce(&self, peer: usize, neighbour: usize, header: &Header, wait: &Wait) -> Result<(), Failure> {
        let count = self.pairs[peer].messages as u32;
        self.board.announce_message(neighbour, header);
        self.board
            .pair_gate(self.board.me(), neighbour, PairGate::Announced)
            .raise(count);
        self.board
            .await_pair(neighbour, PairGate::Announced, count, wait)?;
        header.agree(&self.board.message_header(neighbour), self.group.global(peer))
    }

    /// # Safety
    /// The span must be that of a held buffer.
    unsafe fn put(&mut self, peer: usize, neighbour: usize, span: Span, wait: &Wait) -> Result<u64, Failure> {
        let me = self.board.me();
        for piece in pieces(span) {
            // The stage of the piece that is `STAGES` back must be empty again.
            let put = self.pairs[peer].put;
            self.board
                .await_pair(neighbour, PairGate::Taken, before(put), wait)?;
            let stage = self.board.stage(me, put as usize);
            // SAFETY: the piece lies in the caller's span, the stage is empty and ours.
            unsafe { std::ptr::copy_nonoverlapping(piece.start, stage, piece.len) };
            self.pairs[peer].put = put + 1;
            self.board
                .pair_gate(me, neighbour, PairGate::Put)
                .raise((put + 1) as u32);
        }
        // Stages serve the next operation too, and the header must stay until it is read.
        self.board
            .await_pair(neighbour, PairGate::Taken, self.pairs[peer].put as u32, wait)?;
        Ok(0)
    }

    /// # Safety
    /// The span must be that of a held buffer.
    unsafe fn take(
        &mut self,
        peer: usize,
        neighbour: usize,
        span: Span,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let me = self.board.me();
        for piece in pieces(span) {
            let taken = self.pairs[peer].taken;
            let after = (taken + 1) as u32;
            self.board.await_pair(neighbour, PairGate::Put, after, wait)?;
            let stage = self.board.stage(neighbour, taken as usize);
            // SAFETY: the piece lies in the caller's span; the sender filled the stage and waits for us.
            unsafe { std::ptr::copy_nonoverlapping(stage, piece.start, piece.len) };
            self.pairs[peer].taken = taken + 1;
            self.board.pair_gate(me, neighbour, PairGate::Taken).raise(after);
        }
        Ok(span.len as u64)
    }
}

/// How many pieces must have been taken before piece `put` may go into its stage.
fn before(put: u64) -> u32 {
    (put as u32).wrapping_sub(STAGES as u32 - 1)
}

/// Parts of a span that fit into a stage. An empty message has one empty piece, which says that it was seen.
fn pieces(span: Span) -> impl Iterator<Item = Span> {
    let count = span.len.div_ceil(STAGE_BYTES).max(1);
    (0..count).map(move |index| {
        let at = index * STAGE_BYTES;
        Span {
            start: span.start.wrapping_add(at),
            len: STAGE_BYTES.min(span.len - at),
        }
    })
}
