//! Proofs: each part of what they are of counts.

use super::*;

fn proof() -> GroupProof {
    GroupProof {
        key: DataKey::new([1; 32]),
        group: "world".into(),
        generation: 3,
        rank: 0,
    }
}

const CHALLENGE: Challenge = Challenge {
    magic: MAGIC,
    nonce: [9; 32],
};

/// The hello of rank 1.
fn hello(listener: u64) -> (Hello, Hash) {
    GroupProof { rank: 1, ..proof() }.hello(listener, &CHALLENGE)
}

#[test]
fn both_ends_make_the_same_proofs() {
    let (hello, expected) = hello(0);
    let answer = proof()
        .answer(&hello, CHALLENGE.nonce)
        .expect("it is of this generation");
    assert!(answer == expected);
    assert!(answer != Hash::from_bytes(hello.proof), "it can be sent back");
}

#[test]
fn a_proof_is_of_one_connection_only() {
    let (good, _) = hello(0);
    let is_taken = |proof: GroupProof, hello: &Hello, nonce| proof.answer(hello, nonce).is_some();
    assert!(is_taken(proof(), &good, CHALLENGE.nonce));
    let others = [
        GroupProof {
            key: DataKey::new([2; 32]),
            ..proof()
        },
        GroupProof {
            group: "worl".into(),
            ..proof()
        },
        GroupProof {
            generation: 4,
            ..proof()
        },
        GroupProof { rank: 2, ..proof() },
    ];
    for other in others {
        assert!(!is_taken(other, &good, CHALLENGE.nonce));
    }
    assert!(
        !is_taken(proof(), &good, [8; 32]),
        "an earlier connection's nonce"
    );
    let changes: [fn(&mut Hello); 5] = [
        |hello| hello.rank = 2,
        |hello| hello.generation = 4,
        |hello| hello.nonce[31] ^= 1,
        |hello| hello.proof[0] ^= 128,
        |hello| hello.magic += 1,
    ];
    for change in changes {
        let mut bad = good;
        change(&mut bad);
        assert!(!is_taken(proof(), &bad, CHALLENGE.nonce));
    }
    assert!(
        !is_taken(proof(), &hello(2).0, CHALLENGE.nonce),
        "it is for another rank"
    );
}
