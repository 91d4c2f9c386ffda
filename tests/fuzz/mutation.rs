//! Changes of valid inputs: what a parser must have seen to go deep, with something wrong in it.

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;

/// Numbers at the edges of types and bounds.
const NUMBERS: &[u64] = &[
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    1 << 20,
    99_999_999,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    1 << 53,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];
/// The same as text, and what else may stand for a number.
const WORDS: &[&str] = &[
    "0",
    "-1",
    "1e400",
    "-0.0",
    "NaN",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[[[[[[[",
    "{\"a\":",
    "\\u0000",
    "\u{1b}[2J",
    "\u{202e}",
    "..",
    "/",
    "*",
    "&a",
    "*a",
    "<<:",
    "~",
    "é",
    "🚀",
];
/// Longest input.
pub(crate) const MAX_BYTES: usize = 64 << 10;
/// Most changes of one input.
const MAX_CHANGES: usize = 6;

/// One of the seeds, changed in a few places.
pub(crate) fn mutated(rng: &mut StdRng, seeds: &[Vec<u8>], words: &[&str]) -> Vec<u8> {
    let mut bytes = seeds.choose(rng).cloned().unwrap_or_default();
    for _ in 0..rng.random_range(1..=MAX_CHANGES) {
        change(rng, &mut bytes, seeds, words);
        bytes.truncate(MAX_BYTES);
    }
    bytes
}

fn change(rng: &mut StdRng, bytes: &mut Vec<u8>, seeds: &[Vec<u8>], words: &[&str]) {
    let at = rng.random_range(0..=bytes.len());
    let end = at + rng.random_range(0..=(bytes.len() - at).min(64));
    match rng.random_range(0..11) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
        1 if at < bytes.len() => bytes[at] = rng.random(),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..end)),
        // Again, many times.
        4 => {
            let part = bytes[at..end].to_vec();
            let times = [1, 2, 3, 16, 1000].choose(rng).copied().unwrap_or(1);
            let room = MAX_BYTES.saturating_sub(bytes.len()) / part.len().max(1);
            let repeated = part.repeat(times.min(room));
            bytes.splice(end..end, repeated);
        }
        // The end of another one.
        5 => {
            let other = seeds.choose(rng).map_or(&[][..], Vec::as_slice);
            let from = rng.random_range(0..=other.len());
            bytes.truncate(at);
            bytes.extend(&other[from..]);
        }
        // A part of another one.
        6 => {
            let other = seeds.choose(rng).map_or(&[][..], Vec::as_slice);
            let from = rng.random_range(0..=other.len());
            let to = from + rng.random_range(0..=(other.len() - from).min(256));
            bytes.splice(at..at, other[from..to].iter().copied());
        }
        7 => overwrite(rng, bytes, at),
        8 => replace_number(rng, bytes, at),
        9 => {
            let all = WORDS.iter().chain(words);
            let word = all.collect::<Vec<_>>().choose(rng).map_or("", |word| **word);
            bytes.splice(at..at, word.bytes());
        }
        _ => {
            let random: Vec<u8> = (0..rng.random_range(1..16)).map(|_| rng.random()).collect();
            bytes.splice(at..end, random);
        }
    }
}

/// Writes a number in binary, in either order and any width.
fn overwrite(rng: &mut StdRng, bytes: &mut [u8], at: usize) {
    let number = NUMBERS.choose(rng).copied().unwrap_or(0);
    let number = number.wrapping_add(rng.random_range(0..3)).wrapping_sub(1);
    let width = [1, 2, 4, 8].choose(rng).copied().unwrap_or(8);
    let mut written = number.to_le_bytes()[..width].to_vec();
    if rng.random() {
        written.reverse();
    }
    bytes[at..]
        .iter_mut()
        .zip(written)
        .for_each(|(to, from)| *to = from);
}

/// Replaces the first digits behind a place.
fn replace_number(rng: &mut StdRng, bytes: &mut Vec<u8>, at: usize) {
    let Some(first) = bytes[at..].iter().position(u8::is_ascii_digit) else {
        return;
    };
    let start = at + first;
    let digits = bytes[start..]
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    let number = NUMBERS.choose(rng).map(u64::to_string).unwrap_or_default();
    let word = WORDS.choose(rng).copied().unwrap_or_default().to_owned();
    let text = if rng.random_ratio(3, 4) { number } else { word };
    bytes.splice(start..start + digits, text.bytes());
}
