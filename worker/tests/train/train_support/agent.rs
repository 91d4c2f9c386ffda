//! The agent's end of a control socket: gives a place, and reacts to what the worker says.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};

use ddp_proto::control::{PROTOCOL, ToAgent, ToWorker, WorkerAssignment};
use ddp_proto::env::WorkerEnv;
use ddp_worker::session::Session;

/// What the agent heard, in order.
pub type Heard = Vec<ToAgent>;

/// Runs `work` with a session of a world of one, whose puts into the key-value store all succeed. `react` answers
/// the other messages of the worker.
pub fn with_agent<T>(
    mut env: WorkerEnv,
    react: impl Fn(&ToAgent) -> Option<ToWorker> + Send,
    work: impl FnOnce(&Session) -> T,
) -> (T, Heard) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("ddp-train-test-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    env.control = Some(format!("@{name}"));
    let vars = env.to_vars();
    std::thread::scope(|scope| {
        let agent = scope.spawn(|| {
            let (stream, _) = listener.accept().unwrap();
            let assignment = ToWorker::Assignment(WorkerAssignment {
                protocol: PROTOCOL,
                generation: env.generation,
                env: env.to_vars(),
                node_addr: "127.0.0.1".into(),
                data_key: None,
            });
            serve(stream, &assignment, react)
        });
        let session = Session::from_vars(|name| vars.get(name).cloned()).unwrap();
        let result = work(&session);
        session.shutdown();
        (result, agent.join().unwrap())
    })
}

fn serve(
    mut stream: UnixStream,
    assignment: &ToWorker,
    react: impl Fn(&ToAgent) -> Option<ToWorker>,
) -> Heard {
    let mut heard = Vec::new();
    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
        let Ok(line) = line else { break };
        let message: ToAgent = serde_json::from_str(&line).unwrap();
        let answer = match &message {
            ToAgent::Hello { .. } => Some(assignment.clone()),
            ToAgent::KvPut { call, .. } => Some(ToWorker::KvReply {
                call: *call,
                value: None,
                error: None,
                refusal: None,
            }),
            other => react(other),
        };
        if let Some(answer) = answer {
            // The worker may have left meanwhile.
            let _ = writeln!(stream, "{}", serde_json::to_string(&answer).unwrap());
        }
        heard.push(message);
    }
    heard
}
