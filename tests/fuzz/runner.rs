//! Runs a target on inputs, within its bounds, and keeps those that fail.

use std::cell::Cell;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::memory::most_held;
use crate::mutation::mutated;

/// Inputs that are valid, or went deep.
pub(crate) const CORPUS: &str = "corpus";
/// Inputs that failed once.
pub(crate) const FAILURES: &str = "failures";

/// Time of each target without `DDP_FUZZ_SECONDS`.
const SECONDS: u64 = 3;
/// Processor time that one input may take, in a build without optimisations.
const TIME_BOUND: Duration = Duration::from_secs(2);
/// Memory that one input may take, whatever its length.
const BASE_BYTES: usize = 1 << 20;
/// About how long a line of a kept input is.
const COLUMNS: usize = 100;
/// Tries to cut a failing input down.
const CUTS: usize = 2000;

/// Takes one input.
type Run = Box<dyn Fn(&[u8])>;

/// Something that takes bytes from others.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// Valid inputs, besides those of the corpus.
    pub(crate) seeds: Vec<Vec<u8>>,
    /// Words that its inputs are made of.
    pub(crate) words: &'static [&'static str],
    pub(crate) run: Run,
    /// Most bytes of memory for each byte of an input.
    pub(crate) bytes_per_byte: usize,
}

impl Target {
    pub(crate) fn new(name: &'static str, seeds: Vec<Vec<u8>>, run: impl Fn(&[u8]) + 'static) -> Self {
        Self {
            name,
            seeds,
            words: &[],
            run: Box::new(run),
            bytes_per_byte: 64,
        }
    }
}

/// Panics of inputs are reported with the input: while one is cut down there are thousands.
fn silence_panics_of_inputs() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !RUNS.get() {
                before(panic);
            }
        }));
    });
}

thread_local! {
    /// An input runs.
    static RUNS: Cell<bool> = const { Cell::new(false) };
    static BEGAN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Time that this thread has had a processor.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// The input that runs has taken its time.
pub(crate) fn is_over_time() -> bool {
    processor_time().saturating_sub(BEGAN.get()) > TIME_BOUND
}

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fuzz")
        .join(name)
}

fn committed(kind: &str, target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(folder(kind).join(target)).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let bytes = unescaped(&fs::read_to_string(&path).unwrap());
        (path, bytes)
    };
    files.into_iter().map(read).collect()
}

/// Bytes as text that people can read: `escape_ascii` writes it, in lines.
fn escaped(bytes: &[u8]) -> String {
    let (mut text, mut columns) = (String::new(), 0);
    for byte in bytes {
        let shown = byte.escape_ascii().to_string();
        columns += shown.len();
        text += &shown;
        if columns > COLUMNS || *byte == b'\n' {
            text.push('\n');
            columns = 0;
        }
    }
    text
}

/// The other way round. Ends of lines stand for nothing.
fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'\n' => {}
            b'\\' => bytes.push(match rest.next() {
                Some(b'n') => b'\n',
                Some(b'r') => b'\r',
                Some(b't') => b'\t',
                Some(b'x') => {
                    let digits: String = rest.by_ref().take(2).map(char::from).collect();
                    u8::from_str_radix(&digits, 16).expect("two digits")
                }
                other => other.expect("what the backslash stands for"),
            }),
            byte => bytes.push(byte),
        }
    }
    bytes
}

#[test]
fn an_input_survives_its_text() {
    let all: Vec<u8> = (0..=255).chain(0..=255).collect();
    let text = escaped(&all);
    assert!(
        text.is_ascii() && text.lines().all(|line| line.len() < COLUMNS + 8),
        "{text}"
    );
    assert_eq!(unescaped(&text), all);
}

/// One input; what it did wrong, in words.
pub(crate) fn try_input(target: &Target, bytes: &[u8]) -> Result<(), String> {
    silence_panics_of_inputs();
    RUNS.set(true);
    BEGAN.set(processor_time());
    let (outcome, most) = most_held(|| catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))));
    RUNS.set(false);
    let took = processor_time().saturating_sub(BEGAN.get());
    if let Err(panic) = outcome {
        let words = panic.downcast_ref::<String>().cloned();
        let words = words.or_else(|| panic.downcast_ref::<&str>().map(|words| (*words).to_owned()));
        return Err(format!("it panicked: {}", words.unwrap_or_default()));
    }
    let bound = BASE_BYTES + bytes.len() * target.bytes_per_byte;
    if most > bound {
        return Err(format!(
            "it held {most} bytes of memory, at most {bound} are explained"
        ));
    }
    if took > TIME_BOUND {
        return Err(format!("it took {:.1} s of processor time", took.as_secs_f64()));
    }
    Ok(())
}

/// The whole test of a target.
pub(crate) fn fuzz(target: &Target) {
    let corpus = committed(CORPUS, target.name);
    let failures = committed(FAILURES, target.name);
    let mut count = 1_u64;
    // Once, so that what is made at the first use counts for nothing.
    let _ = try_input(target, &[]);
    check(target, &[]);
    for (path, bytes) in corpus.iter().chain(&failures) {
        if let Err(why) = try_input(target, bytes) {
            panic!("`{}` fails: {why}", path.display());
        }
        count += 1;
    }
    let mut seeds: Vec<Vec<u8>> = target.seeds.clone();
    seeds.extend(corpus.into_iter().chain(failures).map(|(_, bytes)| bytes));
    for seed in &seeds {
        check(target, seed);
        count += 1;
    }
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse().expect("a number"))
    };
    let seconds = number("DDP_FUZZ_SECONDS").unwrap_or(SECONDS);
    let mut rng = StdRng::seed_from_u64(number("DDP_FUZZ_SEED").unwrap_or(0));
    let (began, time) = (Instant::now(), Duration::from_secs(seconds));
    while began.elapsed() < time {
        let bytes = if rng.random_ratio(1, 64) {
            (0..rng.random_range(0..256)).map(|_| rng.random()).collect()
        } else {
            mutated(&mut rng, &seeds, target.words)
        };
        check(target, &bytes);
        count += 1;
    }
    println!("{}: {count} inputs in {seconds} s", target.name);
}

fn check(target: &Target, bytes: &[u8]) {
    let Err(why) = try_input(target, bytes) else {
        return;
    };
    let bytes = cut_down(target, bytes.to_vec());
    let name = &blake3::hash(&bytes).to_hex()[..16];
    let path = folder(FAILURES).join(target.name).join(format!("{name}.txt"));
    let written =
        fs::create_dir_all(path.parent().expect("a folder")).and_then(|()| fs::write(&path, escaped(&bytes)));
    let kept = match written {
        Ok(()) => format!("kept as `{}`: mend what it shows, and commit it", path.display()),
        Err(error) => format!("cannot keep it as `{}`: {error}", path.display()),
    };
    panic!(
        "an input of {} bytes fails target `{}`: {why}\n{kept}",
        bytes.len(),
        target.name
    );
}

/// A shorter input that fails too.
fn cut_down(target: &Target, mut bytes: Vec<u8>) -> Vec<u8> {
    let (mut size, mut tries) = (bytes.len() / 2, 0);
    while size > 0 && tries < CUTS {
        let mut at = 0;
        while at < bytes.len() && tries < CUTS {
            tries += 1;
            let mut shorter = bytes.clone();
            shorter.drain(at..(at + size).min(bytes.len()));
            if try_input(target, &shorter).is_err() {
                bytes = shorter;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    bytes
}
