use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream as Client;
use std::sync::mpsc;

use super::super::wire::tests::{encode, hello, part};
use super::*;
use crate::output::streams::Output;

const DEADLINE: Duration = Duration::from_secs(30);

/// What the console writes, message by message.
struct Said(mpsc::Sender<Vec<u8>>);

impl Write for Said {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The receiver may be gone.
        let _ = self.0.send(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A console, and what is said on it.
fn console() -> (Console, mpsc::Receiver<Vec<u8>>) {
    let (said, output) = mpsc::channel();
    let streams = Output {
        writers: [Box::new(io::sink()), Box::new(Said(said))],
        is_file: [false; 2],
        is_one_place: false,
        looks: [ddp_proto::printable::Look::default(); 2],
    };
    (Console::start(streams, false).unwrap(), output)
}

/// A server and its address; the last is what it says.
fn server() -> (TcpStoreServer, SocketAddr, mpsc::Receiver<Vec<u8>>) {
    server_with(UNUSED_BOUND)
}

fn server_with(patience: Duration) -> (TcpStoreServer, SocketAddr, mpsc::Receiver<Vec<u8>>) {
    let (console, output) = console();
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (
        TcpStoreServer::start(listener, console, patience).unwrap(),
        address,
        output,
    )
}

fn connect(address: SocketAddr) -> Client {
    let mut client = Client::connect(address).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    client.write_all(&hello()).unwrap();
    client
}

fn send(client: &mut Client, command: &Command) {
    client.write_all(&encode(command)).unwrap();
}

fn read(client: &mut Client, bytes: usize) -> Vec<u8> {
    let mut answer = vec![0; bytes];
    client.read_exact(&mut answer).unwrap();
    answer
}

fn is_closed(client: &mut Client) -> bool {
    match client.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_waiting_client_is_woken_by_another() {
    let (_server, address, _said) = server();
    let (mut waiting, mut setting) = (connect(address), connect(address));
    send(&mut waiting, &Command::Wait(vec![b"k".to_vec()]));
    send(&mut setting, &Command::Set(b"k".to_vec(), b"value".to_vec()));
    assert_eq!(read(&mut waiting, 1), [0]);
    send(&mut waiting, &Command::Get(b"k".to_vec()));
    assert_eq!(read(&mut waiting, 13), part(b"value"));
    // This one is never set: the client gives up.
    send(&mut waiting, &Command::Wait(vec![b"never".to_vec()]));
    send(&mut waiting, &Command::CancelWait);
    assert_eq!(read(&mut waiting, 1), [1]);
}

#[test]
fn what_a_client_sent_before_it_left_is_there() {
    let (_server, address, _said) = server();
    let mut waiting = connect(address);
    send(
        &mut waiting,
        &Command::Wait(vec![b"big".to_vec(), b"last".to_vec()]),
    );
    let mut leaving = connect(address);
    send(&mut leaving, &Command::Set(b"big".to_vec(), vec![7; 8 << 20]));
    send(&mut leaving, &Command::Set(b"last".to_vec(), Vec::new()));
    drop(leaving);
    assert_eq!(read(&mut waiting, 1), [0]);
    send(&mut waiting, &Command::Get(b"big".to_vec()));
    assert_eq!(read(&mut waiting, (8 << 20) + 8)[8..], vec![7; 8 << 20]);
}

#[test]
fn strangers_are_closed_and_named_once() {
    let (_server, address, said) = server();
    for _ in 0..3 {
        let mut stranger = Client::connect(address).unwrap();
        stranger.set_read_timeout(Some(DEADLINE)).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(is_closed(&mut stranger));
    }
    let words = String::from_utf8(said.recv_timeout(DEADLINE).unwrap()).unwrap();
    assert!(
        words.contains("does not speak the protocol of PyTorch's TCPStore"),
        "{words}"
    );
    send(&mut connect(address), &Command::CountKeys);
    assert!(said.try_recv().is_err(), "it is said once");
}

#[test]
fn a_store_that_was_closed_ends_its_connections_and_takes_no_more() {
    let (server, address, _said) = server();
    let mut client = connect(address);
    send(&mut client, &Command::CountKeys);
    assert_eq!(read(&mut client, 8), [0; 8]);
    server.close();
    assert_eq!(
        Client::connect(address).unwrap_err().kind(),
        ErrorKind::ConnectionRefused,
        "at once"
    );
    assert!(is_closed(&mut client));
}

/// A script that sets MASTER_PORT itself hung without a word.
#[test]
fn a_store_to_which_no_rank_comes_is_reported() {
    let (_server, address, output) = server_with(Duration::ZERO);
    let text = String::from_utf8(output.recv_timeout(DEADLINE).unwrap()).unwrap();
    let begins = format!(
        "[ddp-run] no rank has come to the store at MASTER_PORT {}",
        address.port()
    );
    assert!(
        text.starts_with(&begins) && text.contains("`--master-port`"),
        "{text}"
    );
}

#[tokio::test]
async fn a_store_that_is_used_is_not_reported() {
    let (console, output) = console();
    let hub = Hub::new(console);
    hub.apply(1, Command::CountKeys).unwrap();
    hub.report_unused(29_500, Duration::ZERO).await;
    hub.console.say("the next message");
    assert_eq!(
        output.recv_timeout(DEADLINE).unwrap(),
        b"[ddp-run] the next message\n"
    );
}
