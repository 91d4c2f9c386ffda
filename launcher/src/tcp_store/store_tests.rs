use super::*;

const READY: [u8; 1] = [0];
const NOT_READY: [u8; 1] = [1];
const STOP_WAITING: [u8; 1] = [0];
const WAIT_CANCELED: [u8; 1] = [1];
const NOTHING: [u8; 0] = [];

fn key(text: &str) -> Key {
    text.as_bytes().to_vec()
}

fn keys(texts: &[&str]) -> Vec<Key> {
    texts.iter().map(|text| key(text)).collect()
}

fn number(number: i64) -> Vec<u8> {
    number.to_le_bytes().to_vec()
}

fn bytes(text: &str) -> Vec<u8> {
    let mut answer = Vec::new();
    put_bytes(&mut answer, text.as_bytes());
    answer
}

impl Store {
    fn answer(&mut self, client: ClientId, command: Command) -> Vec<u8> {
        self.apply(client, command).unwrap()
    }

    fn put(&mut self, name: &str, value: &str) {
        assert_eq!(self.answer(0, Command::Set(key(name), key(value))), NOTHING);
    }

    fn value(&mut self, name: &str) -> Vec<u8> {
        self.answer(0, Command::Get(key(name)))
    }

    fn compare_set_text(&mut self, expected: &str, desired: &str) -> Vec<u8> {
        let (expected, desired) = (key(expected), key(desired));
        let key = key("k");
        self.answer(
            0,
            Command::CompareSet {
                key,
                expected,
                desired,
            },
        )
    }

    /// Who is told that its wait is over.
    fn told(&mut self) -> Vec<ClientId> {
        let woken = self.take_woken();
        woken
            .into_iter()
            .filter(|client| self.take_over(*client))
            .collect()
    }
}

#[test]
fn values_are_set_and_read() {
    let mut store = Store::default();
    store.put("a", "1");
    assert_eq!(store.value("a"), bytes("1"));
    assert_eq!(store.value("missing"), bytes(""));
    let pairs = vec![(key("b"), key("2")), (key("c"), key("3"))];
    assert_eq!(store.answer(0, Command::MultiSet(pairs)), NOTHING);
    let all = store.answer(0, Command::MultiGet(keys(&["a", "b", "c"])));
    assert_eq!(all, [bytes("1"), bytes("2"), bytes("3")].concat());
    assert_eq!(store.answer(0, Command::CountKeys), number(3));
    assert_eq!(store.answer(0, Command::Delete(key("a"))), number(1));
    assert_eq!(store.answer(0, Command::Delete(key("a"))), number(0));
    store.answer(0, Command::Append(key("b"), key("x")));
    assert_eq!(store.value("b"), bytes("2x"));
    assert_eq!(store.answer(0, Command::Delete(key("c"))), number(1));
    assert_eq!(
        store.answer(0, Command::ListKeys),
        [number(1), bytes("b")].concat()
    );
    assert_eq!(store.answer(0, Command::Ping(5)), [5, 0, 0, 0]);
}

#[test]
fn compare_set_answers_the_value_after_it() {
    let mut store = Store::default();
    assert_eq!(store.compare_set_text("x", "new"), bytes("x"), "no such key");
    assert_eq!(store.answer(0, Command::CountKeys), number(0));
    assert_eq!(store.compare_set_text("", "1"), bytes("1"));
    assert_eq!(store.compare_set_text("2", "3"), bytes("1"));
    assert_eq!(store.compare_set_text("1", "3"), bytes("3"));
}

#[test]
fn counters_are_text() {
    let mut store = Store::default();
    let mut add = |delta| store.apply(0, Command::Add(key("n"), delta));
    assert_eq!(add(2), Ok(number(2)));
    assert_eq!(add(-5), Ok(number(-3)));
    assert_eq!(store.value("n"), bytes("-3"));
    store.put("n", " 4 of them");
    assert_eq!(store.apply(0, Command::Add(key("n"), 1)), Ok(number(5)));
    for nonsense in ["", "-", "many", "99999999999999999999"] {
        store.put("n", nonsense);
        assert_eq!(
            store.apply(0, Command::Add(key("n"), 1)),
            Err(Refused::NotANumber)
        );
    }
    store.put("n", &i64::MAX.to_string());
    assert_eq!(store.answer(0, Command::Add(key("n"), 1)), number(i64::MIN));
}

#[test]
fn a_wait_is_over_when_all_its_keys_are_there() {
    let mut store = Store::default();
    store.put("a", "");
    assert_eq!(store.answer(1, Command::Wait(keys(&["a"]))), STOP_WAITING);
    assert_eq!(store.answer(1, Command::Wait(keys(&["a", "b", "c"]))), NOTHING);
    assert_eq!(store.answer(2, Command::Check(keys(&["a", "b"]))), NOT_READY);
    store.put("b", "");
    assert!(store.told().is_empty());
    store.answer(2, Command::Add(key("c"), 1));
    assert_eq!(store.told(), [1]);
    assert!(store.told().is_empty(), "once");
    assert_eq!(store.answer(2, Command::Check(keys(&["a", "b", "c"]))), READY);
}

#[test]
fn a_wait_that_was_canceled_is_not_answered() {
    let mut store = Store::default();
    store.answer(1, Command::Wait(keys(&["a"])));
    assert_eq!(store.answer(1, Command::CancelWait), WAIT_CANCELED);
    store.put("a", "");
    assert!(store.told().is_empty());
    // The key came, but the client had given up before it was told.
    store.answer(1, Command::Wait(keys(&["b"])));
    store.put("b", "");
    assert_eq!(store.answer(1, Command::CancelWait), WAIT_CANCELED);
    assert!(store.told().is_empty());
}

#[test]
fn a_barrier_lets_all_go_when_the_last_arrives() {
    let mut store = Store::default();
    let arrive = |store: &mut Store, client| {
        let barrier = Command::Barrier {
            key: key("b"),
            world_size: 3,
        };
        store.answer(client, barrier)
    };
    assert_eq!(arrive(&mut store, 1), NOTHING);
    assert_eq!(arrive(&mut store, 2), NOTHING);
    assert!(store.told().is_empty());
    assert_eq!(arrive(&mut store, 3), STOP_WAITING);
    assert_eq!(store.told(), [1, 2]);
}

#[test]
fn a_value_of_a_queue_wakes_the_one_that_waited_longest() {
    let mut store = Store::default();
    for client in 1..=3 {
        assert_eq!(store.answer(client, Command::Wait(keys(&["q"]))), NOTHING);
    }
    store.answer(9, Command::QueuePush(key("q"), key("x")));
    assert_eq!(store.told(), [1]);
    assert_eq!(store.answer(9, Command::QueueLength(key("q"))), number(1));
    let popped = store.answer(1, Command::QueuePop(key("q")));
    assert_eq!(popped, [number(1), bytes("x")].concat());
    assert_eq!(store.answer(1, Command::QueuePop(key("q"))), number(0));
    assert!(store.told().is_empty(), "there is nothing for the others");
    // The one that is woken dies; the value is the next one's.
    store.answer(9, Command::QueuePush(key("q"), key("y")));
    assert_eq!(store.told(), [2]);
    store.leave(2);
    assert_eq!(store.told(), [3]);
}

#[test]
fn a_client_that_leaves_leaves_nothing_behind() {
    let mut store = Store::default();
    for client in 0..100 {
        store.answer(client, Command::Wait(keys(&["a", "b", "b"])));
        // The second wait takes the place of the first.
        store.answer(client, Command::Wait(keys(&["a", "c"])));
    }
    store.answer(1, Command::QueuePush(key("q"), key("x")));
    store.answer(1, Command::QueuePop(key("q")));
    store.put("d", "value");
    store.put("d", "longer value");
    store.answer(1, Command::Delete(key("d")));
    (0..100).for_each(|client| store.leave(client));
    assert_eq!(store.bytes, 0);
    assert!(store.waits.is_empty() && store.waiters.is_empty() && store.queues.is_empty());
}

#[test]
fn a_full_store_refuses_more() {
    let mut store = Store {
        bytes: MAX_BYTES - 200,
        ..Store::default()
    };
    store.put("a", "1");
    assert_eq!(
        store.apply(0, Command::Set(key("b"), key("2"))),
        Err(Refused::Full)
    );
    assert_eq!(
        store.apply(0, Command::QueuePush(key("b"), key("2"))),
        Err(Refused::Full)
    );
    assert_eq!(store.apply(0, Command::Wait(keys(&["b"]))), Err(Refused::Full));
    store.put("a", "2");
    store.answer(0, Command::Delete(key("a")));
    store.put("b", "2");
}

#[test]
fn an_answer_of_many_values_is_refused() {
    let mut store = Store::default();
    store.answer(0, Command::Set(key("a"), vec![0; 8 << 20]));
    assert_eq!(
        store.apply(0, Command::MultiGet(vec![key("a"); 100])),
        Err(Refused::AnswerTooLong)
    );
    for _ in 0..7 {
        store.answer(0, Command::Append(key("a"), vec![0; 8 << 20]));
    }
    let more = store.apply(0, Command::Append(key("a"), vec![0; 8 << 20]));
    assert_eq!(more, Err(Refused::AnswerTooLong));
}
