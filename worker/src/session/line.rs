//! Lines of bounded length from a socket, with a deadline where one is wanted.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ddp_proto::control::MAX_LINE_BYTES;

const CHUNK_BYTES: usize = 16 << 10;

/// Splits what the agent says into lines.
pub(super) struct LineReader {
    stream: UnixStream,
    /// Bytes that were read and not yet handed out.
    buffer: Vec<u8>,
    /// No newline in `buffer[..searched]`.
    searched: usize,
}

impl LineReader {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
            searched: 0,
        }
    }

    /// The next line without its newline; `None` at the end. Waits for ever without a deadline: then only
    /// a shutdown of the socket, by either side, ends the wait.
    pub(super) fn next(&mut self, deadline: Option<Instant>) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|&b| b == b'\n') {
                let end = self.searched + at;
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.truncate(end);
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() >= MAX_LINE_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a line is longer than {MAX_LINE_BYTES} bytes"),
                ));
            }
            if !self.fill(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Reads once. False at the end of the stream; a line that was cut off there is no line.
    fn fill(&mut self, deadline: Option<Instant>) -> io::Result<bool> {
        let mut chunk = [0; CHUNK_BYTES];
        loop {
            let left = match deadline.map(|d| d.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Err(io::ErrorKind::TimedOut.into()),
                left => left,
            };
            self.stream.set_read_timeout(left)?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    self.buffer.extend_from_slice(&chunk[..n]);
                    return Ok(true);
                }
                // A timeout of the socket shows as `WouldBlock`; the loop's own clock decides.
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(e) => return Err(e),
            }
        }
    }
}
