//! The wire protocol of PyTorch's TCPStore: from bytes to commands, and from answers to bytes. No I/O.
//!
//! A client first sends `VALIDATE` with a magic number, then commands: a byte that names the command, then its fields.
//! Numbers are little-endian. A key or value comes after its length, a list after its number of items, both in 64 bits.

use std::ops::Range;

/// Longest key; PyTorch's own server has the same bound.
const MAX_KEY_BYTES: u64 = 8 << 10;
/// Longest value; PyTorch's own server has the same bound.
const MAX_VALUE_BYTES: u64 = 8 << 20;
/// Most keys in one command; PyTorch's own server has the same bound.
const MAX_ITEMS: u64 = 128 << 10;
/// Longest command, and longest answer.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// Bytes that a client without an unfinished command may send at once.
const SMALL_READ_BYTES: usize = 4 << 10;
/// Bytes that are read at once within a long command.
const LARGE_READ_BYTES: usize = 64 << 10;

const MAGIC: u32 = 0x3C85_F7CE;

pub(super) type Key = Vec<u8>;
pub(super) type Value = Vec<u8>;

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Ping(u32),
    Set(Key, Value),
    CompareSet {
        key: Key,
        expected: Value,
        desired: Value,
    },
    Get(Key),
    Add(Key, i64),
    Check(Vec<Key>),
    Wait(Vec<Key>),
    CountKeys,
    Delete(Key),
    Append(Key, Value),
    MultiGet(Vec<Key>),
    MultiSet(Vec<(Key, Value)>),
    CancelWait,
    QueuePush(Key, Value),
    QueuePop(Key),
    QueueLength(Key),
    ListKeys,
    Barrier {
        key: Key,
        world_size: i64,
    },
}

/// Why a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum WireError {
    #[error("it does not speak the protocol of PyTorch's TCPStore, or that of a very old version")]
    NotAClient,
    #[error("command {0} is unknown")]
    UnknownCommand(u8),
    #[error("a {what} of {size} bytes is longer than {bound}")]
    TooLong {
        what: &'static str,
        size: u64,
        bound: u64,
    },
    #[error("a list of {0} keys is longer than {MAX_ITEMS}")]
    TooManyItems(u64),
    #[error("a command is longer than {MAX_MESSAGE_BYTES} bytes")]
    CommandTooLong,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Key,
    Value,
    /// Four bytes.
    Word,
    /// Eight bytes.
    Number,
}

/// The fields of a command.
#[derive(Clone, Copy, Debug)]
struct Layout {
    fields: &'static [Field],
    /// They come as often as a number in front of them says.
    is_list: bool,
}

impl Layout {
    fn of(kind: u8) -> Option<Self> {
        use Field::{Key, Number, Value, Word};
        let (fields, is_list): (&[Field], bool) = match kind {
            kind::VALIDATE | kind::PING => (&[Word], false),
            kind::SET | kind::APPEND | kind::QUEUE_PUSH => (&[Key, Value], false),
            kind::COMPARE_SET => (&[Key, Value, Value], false),
            kind::GET | kind::DELETE_KEY | kind::QUEUE_POP | kind::QUEUE_LEN => (&[Key], false),
            kind::ADD | kind::BARRIER => (&[Key, Number], false),
            kind::CHECK | kind::WAIT | kind::MULTI_GET => (&[Key], true),
            kind::MULTI_SET => (&[Key, Value], true),
            kind::GETNUMKEYS | kind::CANCEL_WAIT | kind::LIST_KEYS => (&[], false),
            _ => return None,
        };
        Some(Self { fields, is_list })
    }
}

/// The first byte of each command.
mod kind {
    pub(super) const VALIDATE: u8 = 0;
    pub(super) const SET: u8 = 1;
    pub(super) const COMPARE_SET: u8 = 2;
    pub(super) const GET: u8 = 3;
    pub(super) const ADD: u8 = 4;
    pub(super) const CHECK: u8 = 5;
    pub(super) const WAIT: u8 = 6;
    pub(super) const GETNUMKEYS: u8 = 7;
    pub(super) const DELETE_KEY: u8 = 8;
    pub(super) const APPEND: u8 = 9;
    pub(super) const MULTI_GET: u8 = 10;
    pub(super) const MULTI_SET: u8 = 11;
    pub(super) const CANCEL_WAIT: u8 = 12;
    pub(super) const PING: u8 = 13;
    pub(super) const QUEUE_PUSH: u8 = 14;
    pub(super) const QUEUE_POP: u8 = 15;
    pub(super) const QUEUE_LEN: u8 = 16;
    pub(super) const LIST_KEYS: u8 = 17;
    pub(super) const BARRIER: u8 = 18;
}

/// Turns the bytes of one connection into commands, however they are cut into pieces. Each byte is looked at once.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    /// Where the unfinished command begins.
    start: usize,
    scan: Option<Scan>,
    validated: bool,
}

impl Decoder {
    /// Where the next bytes of the connection are to be appended.
    pub(super) fn space(&mut self) -> &mut Vec<u8> {
        self.bytes.drain(..self.start);
        self.start = 0;
        if self.bytes.is_empty() {
            self.bytes.shrink_to(SMALL_READ_BYTES);
            self.bytes.reserve(SMALL_READ_BYTES);
        } else if self.bytes.capacity() - self.bytes.len() < SMALL_READ_BYTES {
            self.bytes.reserve(LARGE_READ_BYTES);
        }
        &mut self.bytes
    }

    /// Memory that the unfinished command takes.
    pub(super) fn held_bytes(&self) -> usize {
        let parts = self.scan.as_ref().map_or(0, |scan| scan.parts.capacity());
        self.bytes.capacity() + parts * size_of::<Range<usize>>()
    }

    /// The client has sent the magic number.
    pub(super) fn is_validated(&self) -> bool {
        self.validated
    }

    /// The next command, once all of it has arrived.
    pub(super) fn next_command(&mut self) -> Result<Option<Command>, WireError> {
        loop {
            let bytes = &self.bytes[self.start..];
            let Some(first) = bytes.first() else {
                return Ok(None);
            };
            let scan = match &mut self.scan {
                Some(scan) => scan,
                empty => empty.insert(Scan::of(*first, self.validated)?),
            };
            if !scan.is_complete(bytes)? {
                return Ok(None);
            }
            let mut fields = Fields {
                bytes,
                parts: scan.parts.iter(),
            };
            let (kind, length) = (scan.kind, scan.at);
            let command = match kind {
                kind::VALIDATE if fields.word() != Some(MAGIC) => return Err(WireError::NotAClient),
                kind::VALIDATE => None,
                kind => fields.command(kind),
            };
            self.scan = None;
            self.start += length;
            match command {
                None => self.validated = true,
                command => return Ok(command),
            }
        }
    }
}

/// Takes what a client might send, in these pieces; how many commands it was. For `tests/fuzz`.
pub fn read_foreign_commands<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> usize {
    let (mut decoder, mut count) = (Decoder::default(), 0);
    for piece in pieces {
        decoder.space().extend_from_slice(piece);
        loop {
            match decoder.next_command() {
                Ok(Some(_)) => count += 1,
                Ok(None) => break,
                Err(_) => return count,
            }
        }
    }
    count
}

/// How far a command has been looked at. All positions count from its first byte.
#[derive(Debug)]
struct Scan {
    kind: u8,
    layout: Layout,
    at: usize,
    /// Fields that are still to come, once their number has arrived.
    left: Option<u64>,
    parts: Vec<Range<usize>>,
}

impl Scan {
    fn of(kind: u8, validated: bool) -> Result<Self, WireError> {
        if validated == (kind == kind::VALIDATE) {
            return Err(if validated {
                WireError::UnknownCommand(kind)
            } else {
                WireError::NotAClient
            });
        }
        let layout = Layout::of(kind).ok_or(WireError::UnknownCommand(kind))?;
        Ok(Self {
            kind,
            layout,
            at: 1,
            left: (!layout.is_list).then_some(layout.fields.len() as u64),
            parts: Vec::new(),
        })
    }

    /// Goes on; true once all fields are there.
    fn is_complete(&mut self, bytes: &[u8]) -> Result<bool, WireError> {
        if self.left.is_none() {
            let Some(count) = number_at(bytes, self.at) else {
                return Ok(false);
            };
            if count > MAX_ITEMS {
                return Err(WireError::TooManyItems(count));
            }
            self.at += 8;
            self.left = Some(count * self.layout.fields.len() as u64);
        }
        while self.left.is_some_and(|left| left > 0) {
            let field = self.layout.fields[self.parts.len() % self.layout.fields.len()];
            let Some(part) = part_at(field, bytes, self.at)? else {
                return Ok(false);
            };
            if part.end > MAX_MESSAGE_BYTES {
                return Err(WireError::CommandTooLong);
            }
            if part.end > bytes.len() {
                return Ok(false);
            }
            self.at = part.end;
            self.parts.push(part);
            self.left = self.left.map(|left| left - 1);
        }
        Ok(true)
    }
}

/// Where the field that begins at `at` is, if that can be told yet. Its end may not have arrived.
fn part_at(field: Field, bytes: &[u8], at: usize) -> Result<Option<Range<usize>>, WireError> {
    let (what, bound) = match field {
        Field::Word => return Ok(Some(at..at + 4)),
        Field::Number => return Ok(Some(at..at + 8)),
        Field::Key => ("key", MAX_KEY_BYTES),
        Field::Value => ("value", MAX_VALUE_BYTES),
    };
    let Some(size) = number_at(bytes, at) else {
        return Ok(None);
    };
    if size > bound {
        return Err(WireError::TooLong { what, size, bound });
    }
    Ok(Some(at + 8..at + 8 + size as usize))
}

fn number_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_le_bytes(*bytes))
}

/// The fields of a command of which all has arrived, in their order.
struct Fields<'a> {
    bytes: &'a [u8],
    parts: std::slice::Iter<'a, Range<usize>>,
}

impl Fields<'_> {
    /// None only if the fields are not those of the layout.
    fn command(mut self, kind: u8) -> Option<Command> {
        Some(match kind {
            kind::SET => Command::Set(self.part()?, self.part()?),
            kind::COMPARE_SET => Command::CompareSet {
                key: self.part()?,
                expected: self.part()?,
                desired: self.part()?,
            },
            kind::GET => Command::Get(self.part()?),
            kind::ADD => Command::Add(self.part()?, self.number()?),
            kind::CHECK => Command::Check(self.all()),
            kind::WAIT => Command::Wait(self.all()),
            kind::GETNUMKEYS => Command::CountKeys,
            kind::DELETE_KEY => Command::Delete(self.part()?),
            kind::APPEND => Command::Append(self.part()?, self.part()?),
            kind::MULTI_GET => Command::MultiGet(self.all()),
            kind::MULTI_SET => {
                let mut pairs = Vec::new();
                while let Some(key) = self.part() {
                    pairs.push((key, self.part()?));
                }
                Command::MultiSet(pairs)
            }
            kind::CANCEL_WAIT => Command::CancelWait,
            kind::PING => Command::Ping(self.word()?),
            kind::QUEUE_PUSH => Command::QueuePush(self.part()?, self.part()?),
            kind::QUEUE_POP => Command::QueuePop(self.part()?),
            kind::QUEUE_LEN => Command::QueueLength(self.part()?),
            kind::LIST_KEYS => Command::ListKeys,
            kind::BARRIER => Command::Barrier {
                key: self.part()?,
                world_size: self.number()?,
            },
            _ => return None,
        })
    }

    fn part(&mut self) -> Option<Vec<u8>> {
        let part = self.parts.next()?;
        self.bytes.get(part.clone()).map(<[u8]>::to_vec)
    }

    fn all(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.part()).collect()
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.part()?.try_into().ok()?))
    }

    fn number(&mut self) -> Option<i64> {
        Some(i64::from_le_bytes(self.part()?.try_into().ok()?))
    }
}

/// Answers of one byte.
pub(super) const READY: u8 = 0;
pub(super) const NOT_READY: u8 = 1;
pub(super) const STOP_WAITING: u8 = 0;
pub(super) const WAIT_CANCELED: u8 = 1;

pub(super) fn put_number(answer: &mut Vec<u8>, number: i64) {
    answer.extend(number.to_le_bytes());
}

pub(super) fn put_bytes(answer: &mut Vec<u8>, bytes: &[u8]) {
    put_number(answer, bytes.len() as i64);
    answer.extend(bytes);
}

#[cfg(test)]
#[path = "wire_tests.rs"]
pub(super) mod tests;
