//! Compiles `proto/proto/rendezvous.proto`: writes `generated.rs`, and `rendezvous.golden` with one line a declaration.
//!
//! A line of the golden text that the protocol no longer declares would break agents and daemons of earlier releases.
//! Without the argument `--before-release` this program writes nothing then.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::path::Path;

use prost_types::field_descriptor_proto::Label;
use prost_types::{DescriptorProto, FieldDescriptorProto};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto");
    let descriptor = protox::compile(["rendezvous.proto"], [&folder])?;
    let mut declared = BTreeSet::new();
    for file in &descriptor.file {
        for message in &file.message_type {
            declare(message, "", &mut declared);
        }
        for service in &file.service {
            for rpc in &service.method {
                let (name, from, to) = (rpc.name(), short(rpc.input_type()), short(rpc.output_type()));
                let streams = (rpc.client_streaming(), rpc.server_streaming());
                declared.insert(format!("rpc {name}: {from} -> {to}, streams {streams:?}"));
            }
        }
    }
    let golden_path = folder.join("rendezvous.golden");
    let golden = fs::read_to_string(&golden_path).unwrap_or_default();
    let gone: Vec<&str> = golden.lines().filter(|line| !declared.contains(*line)).collect();
    if !gone.is_empty() && !std::env::args().any(|argument| argument == "--before-release") {
        return Err(format!("earlier releases would misunderstand this protocol:\n  {}", gone.join("\n  ")).into());
    }
    let lines: Vec<String> = declared.into_iter().collect();
    fs::write(golden_path, lines.join("\n") + "\n")?;

    let out = folder.join("generated.rs");
    tonic_prost_build::configure()
        .build_transport(true)
        .emit_rerun_if_changed(false)
        .out_dir(&folder)
        .codec_path("crate::codec::SmallBuffers")
        .btree_map(".ddp.rendezvous.v1.Join.agreed")
        // Most joins carry none.
        .boxed(".ddp.rendezvous.v1.Join.place")
        // Shared between all callers that receive the same answer.
        .bytes(".ddp.rendezvous.v1.KvGatherReply.entries")
        .bytes(".ddp.rendezvous.v1.KvGetReply.value")
        // It carries a secret.
        .skip_debug([".ddp.rendezvous.v1.Assignment"])
        .compile_fds(descriptor)?;
    let written = folder.join("ddp.rendezvous.v1.rs");
    let source = blake3::hash(&fs::read(folder.join("rendezvous.proto"))?);
    let code = fs::read_to_string(&written)?;
    fs::remove_file(written)?;
    fs::write(out, format!("// proto/generate wrote this from rendezvous.proto, BLAKE3 {source}\n{code}"))?;
    Ok(())
}

/// Adds a line for each field and value of a message: `Join 1: uint32 protocol`.
fn declare(message: &DescriptorProto, outer: &str, declared: &mut BTreeSet<String>) {
    let name = format!("{outer}{}", message.name());
    for field in &message.field {
        declared.insert(format!("{name} {}: {}", field.number(), field_text(message, field)));
    }
    for nested in &message.nested_type {
        declare(nested, &format!("{name}."), declared);
    }
    for values in &message.enum_type {
        for value in &values.value {
            declared.insert(format!("{name}.{} {}: {}", values.name(), value.number(), value.name()));
        }
    }
}

fn field_text(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let kind = match field.type_name() {
        "" => field.r#type().as_str_name().trim_start_matches("TYPE_").to_lowercase(),
        name => short(name).to_owned(),
    };
    let label = match field.label() {
        Label::Repeated => "repeated ",
        _ if field.proto3_optional() => "optional ",
        _ => "",
    };
    let one_of = field.oneof_index.filter(|_| !field.proto3_optional());
    let one_of = one_of.map_or(String::new(), |index| {
        format!(" of {}", message.oneof_decl[index as usize].name())
    });
    format!("{label}{kind} {}{one_of}", field.name())
}

/// A type's name without the package.
fn short(name: &str) -> &str {
    name.trim_start_matches(".ddp.rendezvous.v1.")
}
