//! Small notes that all ranks of a group exchange while they set something up.
#![allow(unsafe_code, reason = "notes pass through mapped slots")]

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::flat::Flat;
use super::flow::{Script, Span};
use super::header::Header;
use super::moves::Moves;
use super::{Failure, Wait};

/// Size of a note on its way; a longer refusal is cut.
const NOTE_BYTES: usize = 1280;
const REFUSAL_BOUND: usize = 240;

/// What one rank tells the others.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Note {
    /// Why this rank cannot go on.
    pub(super) refusal: Option<String>,
    /// A number: of a shared arena, or of the members of a subgroup.
    pub(super) number: u64,
    /// Where this rank listens.
    pub(super) address: Option<SocketAddr>,
    /// What a caller must know, in hexadecimal.
    pub(super) token: String,
}

impl Note {
    /// A note of a rank that can go on only with `outcome`.
    pub(super) fn refuse<T>(&mut self, outcome: Result<T, Failure>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(failure) => {
                self.refusal = Some(failure.to_string().chars().take(REFUSAL_BOUND).collect());
                None
            }
        }
    }

    fn encode(&self) -> Result<[u8; NOTE_BYTES], Failure> {
        let mut bytes = [b' '; NOTE_BYTES];
        let too_long = |e: serde_json::Error| Failure::Invalid(format!("a note does not fit: {e}"));
        serde_json::to_writer(&mut bytes[..], self).map_err(too_long)?;
        Ok(bytes)
    }
}

impl Flat {
    /// Gives a note to all ranks of the group and gets theirs, by rank. All must make the same call.
    /// If a rank refuses, all get an error that says which and why; the first refusal in rank order wins.
    pub(super) fn swap(&mut self, header: &Header, note: &Note, wait: &Wait) -> Result<Vec<Note>, Failure> {
        let mut ours = note.encode()?;
        let mut all = vec![[b' '; NOTE_BYTES]; self.group.size()];
        self.board.announce(header);
        let slot = self.board.slot(self.board.me());
        // SAFETY: a slot has room for a note, and is ours until the meeting.
        unsafe { slot.cast::<[u8; NOTE_BYTES]>().write(ours) };
        self.board.meet(wait)?;
        self.compare(header)?;
        let mut moves = Moves::new(*header);
        for (neighbour, &rank) in self.group.neighbours().iter().enumerate() {
            moves
                .copies
                .push((self.board.slot(neighbour), span(&mut all[rank])));
        }
        let result_out = span(&mut ours);
        moves.scripts = self
            .group
            .remote()
            .map(|rank| Script {
                result_out,
                result_in: span(&mut all[rank]),
                ..Script::header_only(rank)
            })
            .collect();
        // SAFETY: slots are only read now; the notes are ours, each the target of one rank.
        unsafe { self.run(moves, false, wait) }?;
        let mut notes = Vec::with_capacity(all.len());
        for (rank, bytes) in all.iter().enumerate() {
            let global = self.group.global(rank);
            let note: Note = serde_json::from_slice(bytes)
                .map_err(|e| Failure::Invalid(format!("rank {global} sent a malformed note: {e}")))?;
            if let Some(why) = note.refusal {
                return Err(Failure::Refused { rank: global, why });
            }
            notes.push(note);
        }
        Ok(notes)
    }
}

fn span(bytes: &mut [u8; NOTE_BYTES]) -> Span {
    Span {
        start: bytes.as_mut_ptr(),
        len: NOTE_BYTES,
    }
}
