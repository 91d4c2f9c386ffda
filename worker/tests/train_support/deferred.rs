//! A device that puts everything off: an operation runs when somebody waits for an event behind it, in the waiter's
//! thread, and not a moment earlier. Code that reads results without waiting, or lets a collective start before its
//! input is there, gets yesterday's numbers or a race with a name.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ddp_worker::device::{
    Arena, ArenaSpec, Buffer, CpuDevice, Device, DeviceError, Event, EventState, Stream,
};
use ddp_worker::ops::Op;

/// See the module.
pub struct DeferredDevice {
    cpu: Arc<CpuDevice>,
    queues: Mutex<Vec<Arc<Mutex<Queue>>>>,
}

#[derive(Default)]
struct Queue {
    commands: VecDeque<Command>,
    recorded: u64,
    reached: u64,
    /// First error since the last synchronisation, and after which event it came.
    error: Option<DeviceError>,
}

enum Command {
    Op(Op),
    Upload(Buffer, Vec<u8>),
    Wait(Event, Instant),
    Marker,
}

impl DeferredDevice {
    pub fn new() -> Self {
        Self {
            cpu: Arc::new(CpuDevice::new(1).unwrap()),
            queues: Mutex::default(),
        }
    }

    fn queue(&self, stream: Stream) -> Arc<Mutex<Queue>> {
        self.queues.lock().unwrap()[stream.0 as usize].clone()
    }

    fn push(&self, stream: Stream, command: Command) {
        self.queue(stream).lock().unwrap().commands.push_back(command);
    }
}

impl Queue {
    /// Runs commands until `marker` is reached.
    fn drive(&mut self, cpu: &CpuDevice, marker: u64) {
        while self.reached < marker {
            let command = self.commands.pop_front().expect("the marker is in the queue");
            self.run(cpu, command);
        }
    }

    fn run(&mut self, cpu: &CpuDevice, command: Command) {
        let done = match command {
            Command::Marker => {
                self.reached += 1;
                Ok(())
            }
            _ if self.error.is_some() => Ok(()),
            Command::Op(op) => op.run(cpu.cpu()),
            Command::Upload(dst, bytes) => dst
                .host_bytes_mut()
                .map(|mut target| target.copy_from_slice(&bytes)),
            Command::Wait(event, deadline) => event.wait(deadline),
        };
        if let Err(error) = done {
            self.error = Some(error);
        }
    }
}

struct Point {
    cpu: Arc<CpuDevice>,
    queue: Arc<Mutex<Queue>>,
    marker: u64,
}

impl EventState for Point {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        // Somebody who drives the queue has not reached it yet, as far as a poll can tell.
        let queue = self.queue.try_lock().ok()?;
        (queue.reached >= self.marker).then(|| queue.error.clone().map_or(Ok(()), Err))
    }

    fn wait(&self, _deadline: Instant) -> Result<(), DeviceError> {
        let mut queue = self.queue.lock().unwrap();
        queue.drive(&self.cpu, self.marker);
        queue.error.clone().map_or(Ok(()), Err)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Device for DeferredDevice {
    fn name(&self) -> String {
        "deferred".into()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        self.cpu.alloc(spec)
    }

    fn stream(&self) -> Stream {
        let mut queues = self.queues.lock().unwrap();
        queues.push(Arc::default());
        Stream(queues.len() as u32 - 1)
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        self.push(stream, Command::Op(op));
    }

    fn record(&self, stream: Stream) -> Event {
        let queue = self.queue(stream);
        let marker = {
            let mut queue = queue.lock().unwrap();
            queue.commands.push_back(Command::Marker);
            queue.recorded += 1;
            queue.recorded
        };
        Event::new(Point {
            cpu: self.cpu.clone(),
            queue,
            marker,
        })
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.push(stream, Command::Wait(event.clone(), deadline));
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        let queue = self.queue(stream);
        let mut queue = queue.lock().unwrap();
        while let Some(command) = queue.commands.pop_front() {
            queue.run(&self.cpu, command);
        }
        queue.error.take().map_or(Ok(()), Err)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.push(stream, Command::Upload(dst.clone(), bytes.to_vec()));
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.synchronize(stream)?;
        Ok(src.host_bytes()?.to_vec())
    }
}
