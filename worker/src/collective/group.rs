//! Who is in a group, and on which node.

/// Where one member of a group lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// Global rank.
    pub(super) global: usize,
    /// Rank of its node.
    pub(super) node: usize,
    /// Rank within its node.
    pub(super) local: usize,
}

/// The members of a group, by rank within it, and the order in which their contributions are summed.
#[derive(Clone, Debug)]
pub(super) struct Group {
    seats: Vec<Seat>,
    globals: Vec<usize>,
    me: usize,
    nodes: Vec<Vec<usize>>,
    /// By rank: its node's place in `nodes`, and its place there.
    places: Vec<(usize, usize)>,
    home: usize,
}

impl Group {
    /// `me` is the rank of this process among the seats.
    pub(super) fn new(seats: Vec<Seat>, me: usize) -> Self {
        let mut order: Vec<usize> = (0..seats.len()).collect();
        order.sort_by_key(|&rank| (seats[rank].node, seats[rank].local));
        let nodes: Vec<Vec<usize>> = order
            .chunk_by(|&a, &b| seats[a].node == seats[b].node)
            .map(<[usize]>::to_vec)
            .collect();
        let mut places = vec![(0, 0); seats.len()];
        for (node, ranks) in nodes.iter().enumerate() {
            for (place, &rank) in ranks.iter().enumerate() {
                places[rank] = (node, place);
            }
        }
        let home = places[me].0;
        let globals = seats.iter().map(|seat| seat.global).collect();
        Self {
            seats,
            globals,
            me,
            nodes,
            places,
            home,
        }
    }

    /// Number of members.
    pub(super) fn size(&self) -> usize {
        self.seats.len()
    }

    /// Rank of this process in the group.
    pub(super) fn me(&self) -> usize {
        self.me
    }

    /// Global ranks, in order of rank.
    pub(super) fn globals(&self) -> &[usize] {
        &self.globals
    }

    /// Global rank of a member.
    pub(super) fn global(&self, rank: usize) -> usize {
        self.globals[rank]
    }

    /// Where a member lives.
    pub(super) fn seat(&self, rank: usize) -> Seat {
        self.seats[rank]
    }

    /// The order of sums: nodes in order of node rank, each with its members in order of local rank.
    pub(super) fn nodes(&self) -> &[Vec<usize>] {
        &self.nodes
    }

    /// This node's place in [`Group::nodes`].
    pub(super) fn home(&self) -> usize {
        self.home
    }

    /// The place of a member's node in [`Group::nodes`].
    pub(super) fn node_of(&self, rank: usize) -> usize {
        self.places[rank].0
    }

    /// Who speaks for a node with the rank `other`, so that what all of the node give it, or get of it, crosses the
    /// network once: the member with the same place on its node, as far as there are so many. A rank speaks for itself.
    pub(super) fn speaker(&self, node: usize, other: usize) -> usize {
        let ranks = &self.nodes[node];
        ranks[self.places[other].1 % ranks.len()]
    }

    /// Members on this node, in order of local rank.
    pub(super) fn neighbours(&self) -> &[usize] {
        &self.nodes[self.home]
    }

    /// Position of a member among [`Group::neighbours`], if it lives on this node.
    pub(super) fn neighbour(&self, rank: usize) -> Option<usize> {
        self.neighbours().iter().position(|&r| r == rank)
    }

    /// True if no two members share a node.
    pub(super) fn is_scattered(&self) -> bool {
        self.nodes.len() == self.size()
    }

    /// True if all members share one node.
    pub(super) fn is_gathered(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Members on other nodes, in order of rank.
    pub(super) fn remote(&self) -> impl Iterator<Item = usize> + '_ {
        let home = self.seats[self.me].node;
        (0..self.size()).filter(move |&rank| self.seats[rank].node != home)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_another_node_has_one_to_speak_with() {
        let seat = |global, node, local| Seat { global, node, local };
        // Two ranks on node 0, three on node 1.
        let seats = vec![
            seat(0, 0, 0),
            seat(1, 0, 1),
            seat(2, 1, 0),
            seat(3, 1, 1),
            seat(4, 1, 2),
        ];
        let group = Group::new(seats, 3);
        assert_eq!((group.home(), group.node_of(1), group.node_of(4)), (1, 0, 1));
        let speakers = |node| (0..5).map(|other| group.speaker(node, other)).collect::<Vec<_>>();
        assert_eq!(speakers(0), [0, 1, 0, 1, 0]);
        assert_eq!(speakers(1), [2, 3, 2, 3, 4]);
    }

    #[test]
    fn sums_run_by_node_then_by_local_rank() {
        let seat = |global, node, local| Seat { global, node, local };
        let seats = vec![seat(0, 1, 1), seat(2, 0, 0), seat(4, 1, 0), seat(5, 0, 3)];
        let group = Group::new(seats, 2);
        assert_eq!(group.nodes(), [vec![1, 3], vec![2, 0]]);
        assert_eq!(group.neighbours(), [2, 0]);
        assert_eq!(group.neighbour(0), Some(1));
        assert_eq!(group.remote().collect::<Vec<_>>(), [1, 3]);
        assert!(!group.is_scattered() && !group.is_gathered());
    }
}
