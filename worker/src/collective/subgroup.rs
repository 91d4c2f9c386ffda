//! Subgroups: transports of their own, with their own segments and connections, so that two groups of one rank
//! can be driven by two threads at once.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, OwnedFd};

use super::board::{Board, Neighbour};
use super::door::Door;
use super::flat::Flat;
use super::group::Group;
use super::header::{Call, Header};
use super::link::Link;
use super::note::Note;
use super::reception::{Hello, Listener, dial_tcp, secret};
use super::{Failure, Solo, Transport, Wait};

/// Number of the packets that carry one end of a new door.
const DOOR_LABEL: u64 = 2;

impl Flat {
    /// See [`Transport::split`].
    pub(super) fn subgroup(
        &mut self,
        name: &str,
        members: &[usize],
        wait: &Wait,
    ) -> Result<Box<dyn Transport>, Failure> {
        let header = Header::of_call(Call::Split, self.next(), name);
        let token = secret();
        let mut note = Note {
            number: number_of(name, members),
            token: format!("{token:032x}"),
            ..Note::default()
        };
        note.refuse(self.check_members(members));
        let far: Vec<usize> = self
            .group
            .remote()
            .filter(|rank| members.contains(rank))
            .collect();
        let mut listener = None;
        if !far.is_empty() {
            listener = note.refuse(Listener::tcp(self.place.host_addr));
            note.address = listener.as_ref().map(|(_, address)| *address);
        }
        let notes = self.swap(&header, &note, wait)?;
        self.check_agreement(name, members, &notes)?;
        if members.len() == 1 {
            return Ok(Box::new(Solo::new(self.group.global(self.group.me()))));
        }
        let hello = Hello {
            token,
            generation: self.place.generation,
            rank: self.group.global(self.group.me()),
        };
        let mut sockets = self.connect_far(&far, hello, listener.as_ref().map(|(l, _)| l), &notes, wait)?;
        let me = members.binary_search(&self.group.me()).expect("checked above");
        let seats = members.iter().map(|&rank| self.group.seat(rank)).collect();
        let group = Group::new(seats, me);
        // From here on the others wait for this rank's part: unlike a refusal, this leaves the ranks at different points.
        let board = self
            .open_board(members, &group, wait)
            .map_err(|failure| match failure {
                Failure::Device(error) => Failure::System {
                    what: format!("shared memory of `{name}`"),
                    cause: error.to_string(),
                },
                other => other,
            })?;
        let link = |&global: &usize| sockets.remove(&global).map(|s| Link::new(global, s)).transpose();
        let links = group.globals().iter().map(link).collect::<Result<_, _>>()?;
        Ok(Box::new(Self::new(self.place.clone(), group, board, links)))
    }

    fn check_members(&self, members: &[usize]) -> Result<(), Failure> {
        let ascending = members.windows(2).all(|pair| pair[0] < pair[1]);
        let known = members.iter().all(|&rank| rank < self.group.size());
        if ascending && known && members.contains(&self.group.me()) {
            return Ok(());
        }
        Err(Failure::Invalid(format!(
            "{members:?} are not ascending ranks of this group with rank {} among them",
            self.group.me()
        )))
    }

    /// All members of the subgroup must name the same members.
    fn check_agreement(&self, name: &str, members: &[usize], notes: &[Note]) -> Result<(), Failure> {
        let ours = number_of(name, members);
        match members.iter().find(|&&rank| notes[rank].number != ours) {
            None => Ok(()),
            Some(&rank) => Err(Failure::Mismatch {
                rank: self.group.global(rank),
                ours: format!("split into `{name}` of ranks {members:?}"),
                theirs: "split into a group of another name or with other members".to_owned(),
            }),
        }
    }

    /// Connects to the members on other nodes: dials the lower ones, hears the higher ones.
    fn connect_far(
        &self,
        far: &[usize],
        hello: Hello,
        listener: Option<&Listener>,
        notes: &[Note],
        wait: &Wait,
    ) -> Result<BTreeMap<usize, OwnedFd>, Failure> {
        let mut sockets = BTreeMap::new();
        for &rank in far.iter().filter(|&&rank| rank < self.group.me()) {
            let global = self.group.global(rank);
            let malformed = || Failure::Invalid(format!("rank {global} did not say where it listens"));
            let address = notes[rank].address.ok_or_else(malformed)?;
            let token = u128::from_str_radix(&notes[rank].token, 16).map_err(|_| malformed())?;
            sockets.insert(global, dial_tcp(address, global, Hello { token, ..hello }, wait)?);
        }
        let higher = far.iter().filter(|&&rank| rank > self.group.me());
        let higher: Vec<usize> = higher.map(|&rank| self.group.global(rank)).collect();
        if let Some(listener) = listener {
            sockets.extend(listener.accept(&higher, hello, wait)?);
        }
        Ok(sockets)
    }

    /// The board of a subgroup. Of each pair, the neighbour that sits lower makes their door.
    fn open_board(&self, members: &[usize], group: &Group, wait: &Wait) -> Result<Board, Failure> {
        let joins = |seat: usize| members.contains(&self.group.neighbours()[seat]);
        let mut doors = BTreeMap::new();
        for (seat, global, door) in self.board.doors().filter(|&(seat, ..)| joins(seat)) {
            if self.board.me() < seat {
                let (ours, theirs) = Door::pair()?;
                door.give(DOOR_LABEL, theirs.as_fd(), global, wait)?;
                doors.insert(global, ours);
            }
        }
        for (seat, global, door) in self.board.doors().filter(|&(seat, ..)| joins(seat)) {
            if seat < self.board.me() {
                doors.insert(global, Door::new(door.take(DOOR_LABEL, global, wait)?));
            }
        }
        let neighbours = group.neighbours().iter().map(|&rank| Neighbour {
            global: group.global(rank),
            door: doors.remove(&group.global(rank)),
        });
        let neighbours = neighbours.collect();
        let me = group.neighbour(group.me()).expect("this rank is on its own node");
        Board::new(neighbours, me, self.place.spin, wait)
    }
}

fn number_of(name: &str, members: &[usize]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (name, members).hash(&mut hasher);
    hasher.finish()
}
