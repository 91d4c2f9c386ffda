//! The protocol is additive: agents and daemons of different builds work together. What is committed in
//! `proto/rendezvous.golden` is what earlier builds speak, and a change that they would not understand fails here.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use prost_types::enum_descriptor_proto::EnumReservedRange;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// Writes the generated code anew, and the golden text if nothing was taken away.
const ACCEPT: &str = "DDP_ACCEPT_DESCRIPTOR";

/// The folder of the protocol.
fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("proto")
}

/// `rendezvous.proto`, compiled.
pub(crate) fn descriptor() -> FileDescriptorSet {
    protox::compile(["rendezvous.proto"], [folder()]).expect("the protocol compiles")
}

/// What is declared, by where: a message and a number, a number of an enum, a call.
#[derive(Debug, Default, PartialEq, Eq)]
struct Protocol {
    declared: BTreeMap<(String, i64), String>,
    /// Numbers of messages and enums that no field and no value will have again.
    reserved: BTreeSet<(String, i64)>,
}

impl Protocol {
    fn compiled() -> Self {
        let files = descriptor();
        let mut protocol = Self::default();
        for file in &files.file {
            for message in &file.message_type {
                protocol.add_message("", message);
            }
            for declared in &file.enum_type {
                protocol.add_enum("", declared);
            }
            for service in &file.service {
                for method in &service.method {
                    let stream = |is: Option<bool>| if is.unwrap_or(false) { "stream " } else { "" };
                    let [input, output] = [method.input_type(), method.output_type()].map(short);
                    let (asks, answers) = (stream(method.client_streaming), stream(method.server_streaming));
                    let name = format!("rpc {}.{}", service.name(), method.name());
                    let types = format!("{asks}{input} -> {answers}{output}");
                    protocol.declared.insert((name, 0), types);
                }
            }
        }
        protocol
    }

    fn add_message(&mut self, outer: &str, message: &DescriptorProto) {
        let name = format!("{outer}{}", message.name());
        for field in &message.field {
            let number = i64::from(field.number());
            self.declared
                .insert((name.clone(), number), declaration(message, field));
        }
        for range in &message.reserved_range {
            let numbers = i64::from(range.start())..i64::from(range.end());
            self.reserved.extend(numbers.map(|number| (name.clone(), number)));
        }
        let inner = format!("{name}.");
        for nested in &message.nested_type {
            self.add_message(&inner, nested);
        }
        for declared in &message.enum_type {
            self.add_enum(&inner, declared);
        }
    }

    fn add_enum(&mut self, outer: &str, declared: &EnumDescriptorProto) {
        let name = format!("enum {outer}{}", declared.name());
        for value in &declared.value {
            let place = (name.clone(), i64::from(value.number()));
            self.declared.insert(place, value.name().to_owned());
        }
        for range in &declared.reserved_range {
            // Other than that of a message, its end is reserved too.
            let numbers = i64::from(range.start())..=i64::from(range.end());
            self.reserved.extend(numbers.map(|number| (name.clone(), number)));
        }
    }

    /// `Join 1: uint32 protocol`, a line each, and `DaemonMessage 16: reserved`.
    fn to_text(&self) -> String {
        let reserved = self.reserved.iter().map(|place| (place, "reserved"));
        let declared = self.declared.iter().map(|(place, what)| (place, what.as_str()));
        let lines: BTreeMap<_, _> = declared.chain(reserved).collect();
        let lines = lines
            .iter()
            .map(|((name, number), what)| format!("{name} {number}: {what}\n"));
        lines.collect()
    }

    fn of_text(text: &str) -> Self {
        let mut protocol = Self::default();
        for line in text.lines() {
            let (place, what) = line.split_once(": ").expect("a place and a declaration");
            let (name, number) = place.rsplit_once(' ').expect("a name and a number");
            let place = (name.to_owned(), number.parse().expect("a number"));
            if what == "reserved" {
                protocol.reserved.insert(place);
            } else {
                protocol.declared.insert(place, what.to_owned());
            }
        }
        protocol
    }

    /// What of `self` is declared in another way in `newer`, or taken away without being reserved.
    fn broken_by(&self, newer: &Self) -> Vec<String> {
        let changed = self.declared.iter().filter_map(|(place, what)| {
            let (name, number) = place;
            match newer.declared.get(place) {
                Some(found) if found == what => None,
                Some(found) => Some(format!("{name} {number} was `{what}` and is `{found}`")),
                None if newer.reserved.contains(place) => None,
                None => Some(format!(
                    "{name} {number}, `{what}`, is gone: declare `reserved {number};`"
                )),
            }
        });
        let reused = self
            .reserved
            .iter()
            .filter(|place| !newer.reserved.contains(place));
        let reused = reused.map(|(name, number)| format!("{name} {number} is no longer reserved"));
        changed.chain(reused).collect()
    }
}

/// Type and name of a field, with what matters on the wire.
fn declaration(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let kind = match field.r#type() {
        Type::Message | Type::Enum => short(field.type_name()).to_owned(),
        scalar => scalar.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    };
    let label = match field.label() {
        Label::Repeated => "repeated ",
        _ if field.proto3_optional() => "optional ",
        _ => "",
    };
    let one_of = field.oneof_index.filter(|_| !field.proto3_optional());
    let one_of = one_of.and_then(|index| message.oneof_decl.get(index as usize));
    let one_of = one_of.map(|one_of| format!(" of {}", one_of.name()));
    format!("{label}{kind} {}{}", field.name(), one_of.unwrap_or_default())
}

/// A type's name without the package.
fn short(name: &str) -> &str {
    name.trim_start_matches(".ddp.rendezvous.v1.")
}

#[test]
fn earlier_builds_understand_the_protocol() {
    let path = folder().join("rendezvous.golden");
    let (golden, compiled) = (
        std::fs::read_to_string(&path).unwrap_or_default(),
        Protocol::compiled(),
    );
    let broken = Protocol::of_text(&golden).broken_by(&compiled);
    assert!(
        broken.is_empty(),
        "agents and daemons of earlier releases would misunderstand this build:\n  {}\nadd a field with a new number, and \
         reserve the number of one that goes",
        broken.join("\n  ")
    );
    let text = compiled.to_text();
    if std::env::var_os(ACCEPT).is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        golden == text,
        "`rendezvous.proto` declares more than `proto/proto/rendezvous.golden`: run this test with {ACCEPT}=1, and commit \
         the file that it writes"
    );
}

#[test]
fn the_committed_code_is_what_the_protocol_generates() {
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .build_transport(true)
        .emit_rerun_if_changed(false)
        .out_dir(out.path())
        .codec_path("crate::codec::SmallBuffers")
        // Most joins carry none.
        .boxed(".ddp.rendezvous.v1.Join.place")
        // Shared by all that are answered.
        .bytes(".ddp.rendezvous.v1.KvGatherReply.entries")
        .bytes(".ddp.rendezvous.v1.KvGetReply.value")
        .bytes(".ddp.rendezvous.v1.NodesReply.list")
        // It carries a secret.
        .skip_debug([".ddp.rendezvous.v1.Assignment"])
        .compile_fds(descriptor())
        .unwrap();
    let generated = std::fs::read_to_string(out.path().join("ddp.rendezvous.v1.rs")).unwrap();
    let path = folder().join("generated.rs");
    if std::env::var_os(ACCEPT).is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "`proto/proto/generated.rs` is not what `rendezvous.proto` generates: run this test with {ACCEPT}=1, and commit the \
         file that it writes"
    );
}

#[test]
fn what_breaks_earlier_builds_is_found() {
    let text = "A 1: string name\nA 2: uint32 count\nA 3: reserved\nenum E 0: NONE\n";
    let golden = Protocol::of_text(text);
    assert_eq!(golden.to_text(), text);
    let broken = |newer: &str| golden.broken_by(&Protocol::of_text(newer));
    let none: Vec<String> = Vec::new();
    assert_eq!(broken(text), none);
    assert_eq!(broken(&format!("{text}A 4: bytes more\n")), none, "an addition");
    assert_eq!(
        broken("A 1: string name\nA 2: reserved\nA 3: reserved\nenum E 0: NONE\n"),
        none,
        "it was reserved"
    );
    assert_eq!(
        broken("A 1: bytes name\nA 4: uint32 count\nenum E 0: NO\n"),
        [
            "A 1 was `string name` and is `bytes name`",
            "A 2, `uint32 count`, is gone: declare `reserved 2;`",
            "enum E 0 was `NONE` and is `NO`",
            "A 3 is no longer reserved",
        ]
    );
}

/// It is what the test above asks for where a value is gone.
#[test]
fn a_number_of_an_enum_can_be_reserved() {
    let declared = EnumDescriptorProto {
        name: Some("E".into()),
        reserved_range: vec![EnumReservedRange {
            start: Some(1),
            end: Some(2),
        }],
        ..EnumDescriptorProto::default()
    };
    let mut newer = Protocol::default();
    newer.add_enum("A.", &declared);
    assert_eq!(newer.to_text(), "enum A.E 1: reserved\nenum A.E 2: reserved\n");
    let golden = Protocol::of_text("enum A.E 1: FIRST\nenum A.E 2: LAST\n");
    assert_eq!(golden.broken_by(&newer), [""; 0]);
}
