use super::*;

/// A client's first message.
pub(crate) fn hello() -> Vec<u8> {
    let mut bytes = vec![kind::VALIDATE];
    bytes.extend(MAGIC.to_le_bytes());
    bytes
}

pub(crate) fn part(bytes: &[u8]) -> Vec<u8> {
    let mut part = Vec::new();
    put_bytes(&mut part, bytes);
    part
}

/// What a client sends for a command.
pub(crate) fn encode(command: &Command) -> Vec<u8> {
    let number = |number: i64| number.to_le_bytes().to_vec();
    let list = |keys: &[Key]| {
        let keys_of = keys.iter().flat_map(|key| part(key));
        number(keys.len() as i64).into_iter().chain(keys_of).collect()
    };
    let (kind, fields): (u8, Vec<u8>) = match command {
        Command::Ping(nonce) => (kind::PING, nonce.to_le_bytes().to_vec()),
        Command::Set(key, value) => (kind::SET, [part(key), part(value)].concat()),
        Command::CompareSet {
            key,
            expected,
            desired,
        } => (
            kind::COMPARE_SET,
            [part(key), part(expected), part(desired)].concat(),
        ),
        Command::Get(key) => (kind::GET, part(key)),
        Command::Add(key, delta) => (kind::ADD, [part(key), number(*delta)].concat()),
        Command::Check(keys) => (kind::CHECK, list(keys)),
        Command::Wait(keys) => (kind::WAIT, list(keys)),
        Command::CountKeys => (kind::GETNUMKEYS, Vec::new()),
        Command::Delete(key) => (kind::DELETE_KEY, part(key)),
        Command::Append(key, value) => (kind::APPEND, [part(key), part(value)].concat()),
        Command::MultiGet(keys) => (kind::MULTI_GET, list(keys)),
        Command::MultiSet(pairs) => {
            let pairs_of = pairs.iter().flat_map(|(key, value)| [part(key), part(value)]);
            let pairs_of = pairs_of.flatten();
            let count = number(pairs.len() as i64);
            (kind::MULTI_SET, count.into_iter().chain(pairs_of).collect())
        }
        Command::CancelWait => (kind::CANCEL_WAIT, Vec::new()),
        Command::QueuePush(key, value) => (kind::QUEUE_PUSH, [part(key), part(value)].concat()),
        Command::QueuePop(key) => (kind::QUEUE_POP, part(key)),
        Command::QueueLength(key) => (kind::QUEUE_LEN, part(key)),
        Command::ListKeys => (kind::LIST_KEYS, Vec::new()),
        Command::Barrier { key, world_size } => (kind::BARRIER, [part(key), number(*world_size)].concat()),
    };
    [vec![kind], fields].concat()
}

fn one_of_each() -> Vec<Command> {
    let (key, value) = (b"key".to_vec(), vec![0, 1, 255]);
    let keys = vec![key.clone(), Vec::new()];
    vec![
        Command::Ping(7),
        Command::Set(key.clone(), value.clone()),
        Command::CompareSet {
            key: key.clone(),
            expected: Vec::new(),
            desired: value.clone(),
        },
        Command::Get(key.clone()),
        Command::Add(key.clone(), -3),
        Command::Check(keys.clone()),
        Command::Wait(keys.clone()),
        Command::CountKeys,
        Command::Delete(key.clone()),
        Command::Append(key.clone(), value.clone()),
        Command::MultiGet(Vec::new()),
        Command::MultiSet(vec![(key.clone(), value.clone()), (Vec::new(), Vec::new())]),
        Command::CancelWait,
        Command::QueuePush(key.clone(), value),
        Command::QueuePop(key.clone()),
        Command::QueueLength(key.clone()),
        Command::ListKeys,
        Command::Barrier { key, world_size: 4 },
    ]
}

fn validated() -> Decoder {
    let mut decoder = Decoder::default();
    decoder.space().extend(hello());
    assert_eq!(decoder.next_command(), Ok(None));
    assert!(decoder.is_validated());
    decoder
}

fn error_after(bytes: &[u8]) -> WireError {
    let mut decoder = validated();
    decoder.space().extend(bytes);
    decoder.next_command().expect_err("must be refused")
}

fn of_size(size: u64) -> [u8; 8] {
    size.to_le_bytes()
}

#[test]
fn commands_are_the_same_however_they_are_cut() {
    let commands = one_of_each();
    let bytes: Vec<u8> = commands.iter().flat_map(encode).collect();
    for size in [1, 2, 3, 7, 64, bytes.len()] {
        let mut decoder = validated();
        let mut decoded = Vec::new();
        for piece in bytes.chunks(size) {
            decoder.space().extend(piece);
            while let Some(command) = decoder.next_command().unwrap() {
                decoded.push(command);
            }
        }
        assert_eq!(decoded, commands, "in pieces of {size}");
    }
}

#[test]
fn a_truncated_command_is_no_command() {
    for command in one_of_each() {
        let bytes = encode(&command);
        let mut decoder = validated();
        decoder.space().extend(&bytes[..bytes.len() - 1]);
        assert_eq!(decoder.next_command(), Ok(None), "{command:?}");
    }
}

#[test]
fn who_does_not_begin_with_the_magic_number_is_no_client() {
    for bytes in [&b"GET / HTTP/1.1\r\n"[..], &[0, 1, 2, 3, 4], &[4, 0, 0, 0, 0]] {
        let mut decoder = Decoder::default();
        decoder.space().extend(bytes);
        assert_eq!(decoder.next_command(), Err(WireError::NotAClient));
        assert!(!decoder.is_validated());
    }
    assert_eq!(error_after(&hello()), WireError::UnknownCommand(0));
    assert_eq!(error_after(&[99]), WireError::UnknownCommand(99));
}

#[test]
fn sizes_beyond_the_bounds_are_refused_before_the_bytes_arrive() {
    for size in [MAX_KEY_BYTES + 1, u64::MAX] {
        let error = error_after(&[&[kind::GET][..], &of_size(size)].concat());
        assert!(matches!(error, WireError::TooLong { what: "key", .. }), "{error}");
    }
    let value = [&[kind::SET][..], &part(b"k"), &of_size(MAX_VALUE_BYTES + 1)].concat();
    assert!(matches!(
        error_after(&value),
        WireError::TooLong { what: "value", .. }
    ));
    let list = [&[kind::WAIT][..], &of_size(u64::MAX)].concat();
    assert_eq!(error_after(&list), WireError::TooManyItems(u64::MAX));
}

#[test]
fn a_command_of_many_long_values_is_refused() {
    let mut decoder = validated();
    decoder
        .space()
        .extend([&[kind::MULTI_SET][..], &of_size(MAX_ITEMS)].concat());
    let value = vec![0; MAX_VALUE_BYTES as usize];
    let item = [part(b"k"), part(&value)].concat();
    let error = (0..MAX_ITEMS).find_map(|_| {
        decoder.space().extend(&item);
        decoder.next_command().err()
    });
    assert_eq!(error, Some(WireError::CommandTooLong));
    assert!(decoder.held_bytes() < 3 * MAX_MESSAGE_BYTES);
}

#[test]
fn garbage_ends_in_an_error_or_waits_for_more() {
    for seed in 0..2000_u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut decoder = validated();
        for _ in 0..64 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Mostly small numbers, so that whole commands come about.
            let byte = (state >> 32) as u8;
            decoder.space().push(if state.is_multiple_of(5) {
                byte
            } else {
                byte % 20 % 3
            });
            while let Ok(Some(_)) = decoder.next_command() {}
        }
    }
}

#[test]
fn memory_of_a_long_command_is_given_back() {
    let mut decoder = validated();
    let command = Command::Set(b"k".to_vec(), vec![1; MAX_VALUE_BYTES as usize]);
    decoder.space().extend(encode(&command));
    assert_eq!(decoder.next_command(), Ok(Some(command)));
    decoder.space();
    assert!(
        decoder.held_bytes() <= 2 * SMALL_READ_BYTES,
        "{}",
        decoder.held_bytes()
    );
}
