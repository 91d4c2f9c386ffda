//! Shared arenas: a segment of each rank, mapped by all ranks of its node.

use std::os::fd::AsFd;

use super::flat::Flat;
use super::header::{Call, Header};
use super::note::Note;
use super::segment::SharedSegment;
use super::{Failure, Wait};
use crate::device::{Arena, ArenaSpec, HostMemory};

impl Flat {
    /// Allocates an arena on every rank of the group; operations on it, of this group and of its subgroups, work
    /// in place. Either all ranks get theirs or none does: those that cannot learn why, the others who the first is.
    pub(super) fn share(&mut self, spec: &ArenaSpec, wait: &Wait) -> Result<Arena, Failure> {
        let bytes = spec.bytes();
        let call = Call::Allocation(spec.dtype, spec.len);
        // Before any rank allocates, all see that there is room for all of them.
        let header = Header::of_call(call, self.next(), &spec.name);
        let mut note = Note {
            number: rand::random::<u64>() | 1,
            ..Note::default()
        };
        let room = HostMemory::check_room(&spec.name, bytes, self.board.ranks()).map_err(Failure::from);
        note.refuse(room.clone());
        let ((), notes) = both(room, self.swap(&header, &note, wait))?;
        let number = notes[0].number;

        let header = Header::of_call(call, self.next(), &spec.name);
        let mut note = Note::default();
        let own = if self.board.ranks() == 1 {
            // Nobody to share with; private memory can have huge pages.
            HostMemory::private(&spec.name, bytes)
        } else {
            HostMemory::shared(&spec.name, bytes)
        };
        let own = own.map_err(Failure::from);
        note.refuse(own.as_ref().map_err(Clone::clone));
        let (own, _) = both(own, self.swap(&header, &note, wait))?;
        let neighbours = self.exchange_segments(&spec.name, &own, number, wait)?;
        let memory = SharedSegment::new(number, own, neighbours);
        Ok(Arena::new(spec, memory))
    }

    fn exchange_segments(
        &self,
        name: &str,
        own: &HostMemory,
        number: u64,
        wait: &Wait,
    ) -> Result<Vec<(usize, HostMemory)>, Failure> {
        for (_, global, door) in self.board.doors() {
            let fd = own.fd().expect("shared memory has a descriptor");
            door.give(number, fd.as_fd(), global, wait)?;
        }
        let mut neighbours = Vec::with_capacity(self.board.ranks() - 1);
        for (_, global, door) in self.board.doors() {
            let fd = door.take(number, global, wait)?;
            // Other ranks may have theirs by now: unlike a refusal, this leaves the ranks at different points.
            let memory = HostMemory::map(name, fd, own.len()).map_err(|error| Failure::System {
                what: format!("mapping the memory of rank {global}"),
                cause: error.to_string(),
            })?;
            neighbours.push((global, memory));
        }
        Ok(neighbours)
    }
}

/// What this rank itself could do, and what the others say: its own failure says more than its refusal does in words, and
/// is no consequence of another rank's.
fn both<T, U>(own: Result<T, Failure>, swapped: Result<U, Failure>) -> Result<(T, U), Failure> {
    match (own, swapped) {
        (Err(own), Err(Failure::Refused { .. })) => Err(own),
        (own, swapped) => {
            let swapped = swapped?;
            Ok((own?, swapped))
        }
    }
}
