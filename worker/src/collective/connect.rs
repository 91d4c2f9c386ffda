//! Finds the other ranks of the world, over the key-value store.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::board::{Board, Neighbour};
use super::door::Door;
use super::flat::Flat;
use super::group::{Group, Seat};
use super::link::Link;
use super::lookup::{Lookup, RollCall};
use super::reception::{Hello, Listener, dial_tcp, dial_unix, secret};
use super::{Failure, Place, Solo, Transport, Wait};
use crate::session::{Cancel, KeyValue};

/// What a rank publishes about itself.
#[derive(Debug, Serialize, Deserialize)]
struct Card {
    node: usize,
    local: usize,
    unix: String,
    tcp: Option<SocketAddr>,
    token: String,
}

/// The transport of the whole world: shared memory to the ranks of this node, TCP to the others.
///
/// Every rank of the generation must call it. `store` must be scoped to the job and the generation; it is not
/// used after the call returns. `timeout` bounds the whole call, and `cancel` ends it within 100 ms, or when a store
/// that is out of reach has said so. Later waits are bounded and ended by the [`Wait`] of each operation.
pub fn connect(
    place: &Place,
    store: &dyn KeyValue,
    cancel: &Cancel,
    timeout: Duration,
) -> Result<Box<dyn Transport>, Failure> {
    check_place(place)?;
    if place.world_size == 1 {
        return Ok(Box::new(Solo::new(place.rank)));
    }
    let wait = Wait::new(timeout, cancel);
    let token = secret();
    let unix = format!("ddp-{token:032x}");
    let far = place.world_size - place.local_world_size;
    let unix_listener = Listener::unix(&unix, place.local_world_size)?;
    let tcp_listener = (far > 0).then(|| Listener::tcp(place.host_addr)).transpose()?;
    let card = Card {
        node: place.node_rank,
        local: place.local_rank,
        unix,
        tcp: tcp_listener.as_ref().map(|(_, address)| *address),
        token: format!("{token:032x}"),
    };
    let cards = exchange_cards(place, &card, store, &wait)?;
    check_cards(place, &cards)?;

    let hello = Hello {
        token,
        generation: place.generation,
        rank: place.rank,
    };
    let mut sockets = dial_lower(place, &cards, hello, &wait)?;
    let higher = |near: bool| {
        let ranks = place.rank + 1..place.world_size;
        ranks
            .filter(|&rank| (cards[rank].node == place.node_rank) == near)
            .collect::<Vec<_>>()
    };
    sockets.extend(unix_listener.accept(&higher(true), hello, &wait)?);
    if let Some((listener, _)) = &tcp_listener {
        sockets.extend(listener.accept(&higher(false), hello, &wait)?);
    }
    let seats = cards.iter().enumerate().map(|(global, card)| Seat {
        global,
        node: card.node,
        local: card.local,
    });
    let group = Group::new(seats.collect(), place.rank);
    assemble(place, group, sockets, &wait)
}

fn assemble(
    place: &Place,
    group: Group,
    mut sockets: BTreeMap<usize, OwnedFd>,
    wait: &Wait,
) -> Result<Box<dyn Transport>, Failure> {
    let neighbours = group.neighbours().iter().map(|&rank| Neighbour {
        global: rank,
        door: sockets.remove(&rank).map(Door::new),
    });
    let neighbours = neighbours.collect();
    let me = group.neighbour(place.rank).expect("this rank is on its own node");
    let board = Board::new(neighbours, me, place.spin, wait)?;
    let link = |rank| {
        sockets
            .remove(&rank)
            .map(|socket| Link::new(rank, socket))
            .transpose()
    };
    let links = (0..place.world_size).map(link).collect::<Result<_, _>>()?;
    Ok(Box::new(Flat::new(place.clone(), group, board, links)))
}

/// Connects to all lower ranks.
fn dial_lower(
    place: &Place,
    cards: &[Card],
    hello: Hello,
    wait: &Wait,
) -> Result<BTreeMap<usize, OwnedFd>, Failure> {
    let mut sockets = BTreeMap::new();
    for (rank, card) in cards.iter().enumerate().take(place.rank) {
        let malformed = || Failure::Invalid(format!("rank {rank} published a malformed card"));
        let token = u128::from_str_radix(&card.token, 16).map_err(|_| malformed())?;
        let hello = Hello { token, ..hello };
        let socket = if card.node == place.node_rank {
            dial_unix(&card.unix, rank, hello, wait)?
        } else {
            dial_tcp(card.tcp.ok_or_else(malformed)?, rank, hello, wait)?
        };
        sockets.insert(rank, socket);
    }
    Ok(sockets)
}

fn exchange_cards(
    place: &Place,
    card: &Card,
    store: &dyn KeyValue,
    wait: &Wait,
) -> Result<Vec<Card>, Failure> {
    let lookup = Lookup {
        store,
        wait,
        what: "exchanging addresses with the other ranks",
    };
    let bytes = serde_json::to_vec(card).expect("a card has no map keys that could fail");
    lookup.tell(&key(place.rank), &bytes)?;
    let mut cards = Vec::with_capacity(place.world_size);
    for rank in 0..place.world_size {
        let bytes = lookup.await_key(&key(rank), || absent(rank, place.world_size, store))?;
        let card = serde_json::from_slice(&bytes)
            .map_err(|e| Failure::Invalid(format!("rank {rank} published a malformed card: {e}")))?;
        cards.push(card);
    }
    Ok(cards)
}

/// `first` has not come in time, and who else of those after it.
fn absent(first: usize, world: usize, store: &dyn KeyValue) -> Vec<usize> {
    let now = Instant::now();
    let others: Vec<usize> = (first + 1..world).collect();
    let found = RollCall::hold(&others, now, |rank| Ok(store.get(&key(rank), now)?.is_some()));
    std::iter::once(first).chain(found.absent).collect()
}

fn key(rank: usize) -> String {
    format!("collective/{rank}")
}

/// A place must be one in its world.
fn check_place(place: &Place) -> Result<(), Failure> {
    let Place {
        rank,
        world_size,
        local_rank,
        local_world_size,
        ..
    } = *place;
    if rank < world_size && local_rank < local_world_size && local_world_size <= world_size {
        return Ok(());
    }
    Err(Failure::Invalid(format!(
        "rank {rank} of {world_size} cannot be rank {local_rank} of {local_world_size} on its node\n  hint: the environment of this worker is not the one its launcher set"
    )))
}

/// What the ranks say of themselves must fit together.
fn check_cards(place: &Place, cards: &[Card]) -> Result<(), Failure> {
    let mut near: Vec<usize> = cards
        .iter()
        .filter(|card| card.node == place.node_rank)
        .map(|card| card.local)
        .collect();
    near.sort_unstable();
    if near.iter().copied().eq(0..place.local_world_size) {
        return Ok(());
    }
    Err(Failure::Invalid(format!(
        "node {} should have {} ranks, but ranks with these local ranks came: {near:?}\n  hint: the environment of some worker is not the one its launcher set",
        place.node_rank, place.local_world_size
    )))
}
