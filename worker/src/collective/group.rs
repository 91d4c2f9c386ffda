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
        let home = nodes
            .iter()
            .position(|node| node.contains(&me))
            .expect("this rank is a member");
        let globals = seats.iter().map(|seat| seat.global).collect();
        Self {
            seats,
            globals,
            me,
            nodes,
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
