//! Words of peers, as they may reach a terminal or a line of a log.
//!
//! Whoever speaks to an agent or to the daemon chooses its own host name, role and messages. A control character among
//! them could move a terminal's cursor, change its title or hide what was written. So all text of a message is cleaned where
//! the message arrives ([`Clean`]), and nothing behind that has to think of it. What the workers of a node write themselves
//! stays as it is: it is their user's.

use std::borrow::Cow;
use std::iter::Peekable;

use crate::rendezvous::agent_message::Body as Report;
use crate::rendezvous::daemon_message::Body as Word;
use crate::rendezvous::{
    AgentMessage, Assignment, DaemonMessage, Failure, Failures, GenerationOver, GenerationStatus, Heartbeat,
    JobSummary, JobsReply, Join, NodeAssignment, NodeList, NodeStatus, StatusReply, WorkerExit,
};

/// Stands for a control character.
const REPLACEMENT: char = '\u{fffd}';

/// Text of several lines: line ends and tabs stay, every other control character is replaced. Colours are left out.
pub fn text(words: &str) -> Cow<'_, str> {
    printable(words, |c| matches!(c, '\n' | '\t'))
}

/// A name, or words within a line: line ends are replaced too.
pub fn line(words: &str) -> Cow<'_, str> {
    printable(words, |c| c == '\t')
}

fn printable(words: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_good = |c: char| stays(c) || !is_control(c);
    if words.chars().all(is_good) {
        return Cow::Borrowed(words);
    }
    let mut clean = String::with_capacity(words.len());
    let mut chars = words.chars().peekable();
    while let Some(c) = chars.next() {
        if is_good(c) {
            clean.push(c);
        } else if c != '\u{1b}' || !skip_colour(&mut chars) {
            clean.push(REPLACEMENT);
        }
    }
    Cow::Owned(clean)
}

/// C0, DEL and C1; what changes the direction of a text, and what some terminals take for the end of a line.
fn is_control(c: char) -> bool {
    let changes_direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || changes_direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Skips the rest of `ESC [ 1 ; 31 m`, as programs write that colour their messages; false if it is anything else.
fn skip_colour(chars: &mut Peekable<std::str::Chars<'_>>) -> bool {
    let mut ahead = chars.clone();
    if ahead.next() != Some('[') {
        return false;
    }
    let parameter = |c: &char| c.is_ascii_digit() || matches!(c, ';' | ':');
    while ahead.next_if(parameter).is_some() {}
    let is_colour = ahead.next() == Some('m');
    if is_colour {
        *chars = ahead;
    }
    is_colour
}

/// A message whose text can be cleaned.
pub trait Clean {
    /// Replaces what must not reach a terminal.
    fn clean(&mut self);
}

fn clean_text(words: &mut String) {
    if let Cow::Owned(clean) = text(words) {
        *words = clean;
    }
}

fn clean_line(words: &mut String) {
    if let Cow::Owned(clean) = line(words) {
        *words = clean;
    }
}

impl<T: Clean> Clean for Option<T> {
    fn clean(&mut self) {
        if let Some(message) = self {
            message.clean();
        }
    }
}

impl<T: Clean> Clean for Vec<T> {
    fn clean(&mut self) {
        self.iter_mut().for_each(T::clean);
    }
}

impl Clean for DaemonMessage {
    fn clean(&mut self) {
        match &mut self.body {
            Some(Word::Waiting(waiting)) => clean_text(&mut waiting.reason),
            Some(Word::Assignment(assignment)) => assignment.clean(),
            Some(Word::GenerationOver(over)) => over.clean(),
            Some(Word::JobOver(over)) => {
                clean_text(&mut over.reason);
                clean_text(&mut over.no_restart);
                clean_line(&mut over.first_failure_host);
                over.first_failure.clean();
                over.failures.clean();
            }
            Some(Word::Refused(refused)) => {
                clean_text(&mut refused.reason);
                refused.failures.clean();
            }
            Some(Word::HeartbeatAck(_)) | None => {}
        }
    }
}

impl Clean for AgentMessage {
    fn clean(&mut self) {
        [&mut self.job_id, &mut self.incarnation, &mut self.assignment_id]
            .into_iter()
            .for_each(clean_line);
        match &mut self.body {
            Some(Report::Join(join)) => join.clean(),
            Some(Report::WorkerExit(exit)) => exit.clean(),
            Some(Report::NodeStopped(stopped)) => stopped.exits.clean(),
            Some(Report::Leave(leave)) => clean_text(&mut leave.reason),
            Some(Report::Heartbeat(heartbeat)) => heartbeat.clean(),
            Some(Report::NodeSucceeded(_) | Report::NodeLeaving(_)) | None => {}
        }
    }
}

impl Clean for Join {
    fn clean(&mut self) {
        clean_text(&mut self.job_description);
        let names = [
            &mut self.hostname,
            &mut self.local_addr,
            &mut self.job_signature,
            &mut self.run_token,
            &mut self.role,
        ];
        names.into_iter().for_each(clean_line);
        if let Some(place) = &mut self.place {
            place.assignment.clean();
            place.heartbeat.clean();
        }
    }
}

impl Clean for Assignment {
    fn clean(&mut self) {
        clean_text(&mut self.reason);
        [
            &mut self.master_addr,
            &mut self.run_token,
            &mut self.assignment_id,
            &mut self.nodes_digest,
        ]
        .into_iter()
        .for_each(clean_line);
        self.nodes.clean();
        self.own.clean();
    }
}

impl Clean for NodeAssignment {
    fn clean(&mut self) {
        [&mut self.hostname, &mut self.addr, &mut self.role]
            .into_iter()
            .for_each(clean_line);
    }
}

impl Clean for NodeList {
    fn clean(&mut self) {
        self.nodes.clean();
    }
}

impl Clean for GenerationOver {
    fn clean(&mut self) {
        clean_text(&mut self.cause);
        clean_line(&mut self.first_failure_host);
        self.first_failure.clean();
    }
}

impl Clean for WorkerExit {
    fn clean(&mut self) {
        for line in &mut self.stderr_tail {
            // What a terminal shows of a line that was written over and over, as of a progress bar.
            let shown = line
                .trim_end_matches('\r')
                .rsplit('\r')
                .next()
                .unwrap_or_default();
            *line = self::line(shown).into_owned();
        }
        clean_text(&mut self.message);
        [&mut self.log_file, &mut self.activity]
            .into_iter()
            .for_each(clean_line);
    }
}

impl Clean for Failures {
    fn clean(&mut self) {
        self.failures.clean();
    }
}

impl Clean for Failure {
    fn clean(&mut self) {
        clean_line(&mut self.hostname);
        clean_text(&mut self.node_gone);
        self.exit.clean();
    }
}

impl Clean for StatusReply {
    fn clean(&mut self) {
        [&mut self.phase, &mut self.assignment_id]
            .into_iter()
            .for_each(clean_line);
        clean_text(&mut self.reason);
        self.nodes.clean();
        self.generations.clean();
    }
}

impl Clean for NodeStatus {
    fn clean(&mut self) {
        [&mut self.hostname, &mut self.addr, &mut self.log_dir]
            .into_iter()
            .for_each(clean_line);
    }
}

impl Clean for GenerationStatus {
    fn clean(&mut self) {
        [&mut self.began, &mut self.ended]
            .into_iter()
            .for_each(clean_text);
    }
}

impl Clean for JobsReply {
    fn clean(&mut self) {
        self.jobs.clean();
    }
}

impl Clean for JobSummary {
    fn clean(&mut self) {
        [&mut self.job_id, &mut self.phase]
            .into_iter()
            .for_each(clean_line);
        clean_text(&mut self.reason);
    }
}

impl Clean for Heartbeat {
    fn clean(&mut self) {
        clean_line(&mut self.log_dir);
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use prost::Message;
    use prost_types::DescriptorProto;
    use prost_types::field_descriptor_proto::Type;

    use super::*;

    #[test]
    fn control_characters_are_replaced_and_words_are_not() {
        for (words, as_text, as_line) in [
            ("node-1", "node-1", "node-1"),
            ("größe 模型 🚀", "größe 模型 🚀", "größe 模型 🚀"),
            ("a\nb\tc", "a\nb\tc", "a\u{fffd}b\tc"),
            ("a\r\x1b[2Jb", "a\u{fffd}\u{fffd}[2Jb", "a\u{fffd}\u{fffd}[2Jb"),
            ("\x1b[1;31mred\x1b[0m", "red", "red"),
            (
                "\x1b]0;title\x07",
                "\u{fffd}]0;title\u{fffd}",
                "\u{fffd}]0;title\u{fffd}",
            ),
            (
                "\u{9b}2J\u{7f}\0",
                "\u{fffd}2J\u{fffd}\u{fffd}",
                "\u{fffd}2J\u{fffd}\u{fffd}",
            ),
            ("exe\u{202e}gpj", "exe\u{fffd}gpj", "exe\u{fffd}gpj"),
            ("\x1b[", "\u{fffd}[", "\u{fffd}["),
        ] {
            assert_eq!((&*text(words), &*line(words)), (as_text, as_line), "{words:?}");
        }
    }

    /// In every place of a message where there is text.
    const HOSTILE: &str = "\x1b[2J\u{202e}";

    /// The fields of a message with hostile text in each, on the wire; each part of a `oneof` makes a message of its own.
    fn hostile(messages: &[DescriptorProto], name: &str, depth: usize) -> Vec<Vec<u8>> {
        let found = messages.iter().find(|message| message.name() == name).unwrap();
        let (mut common, mut alternatives) = (Vec::new(), Vec::new());
        for field in &found.field {
            let is_alternative = field.oneof_index.is_some() && !field.proto3_optional();
            let contents = match field.r#type() {
                Type::String => vec![HOSTILE.as_bytes().to_vec()],
                Type::Message if depth > 0 => {
                    let of = field.type_name().rsplit('.').next().unwrap();
                    hostile(messages, of, depth - 1)
                }
                _ => continue,
            };
            for content in contents {
                let mut bytes = Vec::new();
                prost::encoding::encode_varint((field.number() as u64) << 3 | 2, &mut bytes);
                prost::encoding::encode_varint(content.len() as u64, &mut bytes);
                bytes.extend(content);
                if is_alternative {
                    alternatives.push(bytes);
                } else {
                    common.extend(bytes);
                }
            }
        }
        if alternatives.is_empty() {
            return vec![common];
        }
        let whole = alternatives
            .into_iter()
            .map(|part| [common.clone(), part].concat());
        whole.collect()
    }

    fn assert_all_is_cleaned<M: Message + Clean + Debug + Default>(name: &str) {
        let files = crate::compatibility::descriptor();
        let messages: Vec<DescriptorProto> = files
            .file
            .into_iter()
            .flat_map(|file| file.message_type)
            .collect();
        let all = hostile(&messages, name, 5);
        for bytes in &all {
            let mut message = M::decode(bytes.as_slice()).unwrap();
            let dirty = format!("{message:?}");
            message.clean();
            let clean = format!("{message:?}");
            // As `Debug` writes them.
            for control in ["\\u{1b}", "\\u{202e}"] {
                assert!(!clean.contains(control), "{clean}");
            }
            assert!(
                dirty.contains("\\u{1b}") || !bytes.windows(2).any(|pair| pair == b"\x1b["),
                "{dirty}"
            );
        }
        assert!(!all.is_empty());
    }

    /// A field that is added later has to be cleaned too.
    #[test]
    fn every_text_of_every_message_is_cleaned() {
        assert_all_is_cleaned::<DaemonMessage>("DaemonMessage");
        assert_all_is_cleaned::<AgentMessage>("AgentMessage");
        assert_all_is_cleaned::<StatusReply>("StatusReply");
        assert_all_is_cleaned::<JobsReply>("JobsReply");
        assert_all_is_cleaned::<NodeList>("NodeList");
    }
}
