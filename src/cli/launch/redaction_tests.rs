//! The rules, one by one.

use super::*;

/// Command lines, and how they are shown.
const LINES: &[(&str, &str)] = &[
    // Names that say it.
    ("--password=hunter2 --lr 3", "--password=… --lr 3"),
    ("--db-password hunter2 --lr 3", "--db-password … --lr 3"),
    ("--password -hunter2hunter2", "--password …"),
    (
        "env WANDB_API_KEY=hunter2 python t.py",
        "env WANDB_API_KEY=… python t.py",
    ),
    (
        "AWS_SECRET_ACCESS_KEY=abc AWS_REGION=eu",
        "AWS_SECRET_ACCESS_KEY=… AWS_REGION=eu",
    ),
    ("trainer.api_key=a=b x", "trainer.api_key=… x"),
    ("--set logger.apiKey=abc", "--set logger.apiKey=…"),
    ("--set=wandb.api_key=abc", "--set=wandb.api_key=…"),
    (
        "--client-secret s --credentials c",
        "--client-secret … --credentials …",
    ),
    (
        "--password-file /etc/p --secret-name prod",
        "--password-file /etc/p --secret-name prod",
    ),
    ("--use-password --lr 3", "--use-password --lr 3"),
    (
        "--password 20240117 --seed 20240117",
        "--password … --seed 20240117",
    ),
    ("env PGPASSWORD=hunter2 psql", "env PGPASSWORD=… psql"),
    (
        "PASSWORD1=x DB_PASSWORD_PROD=x SECRET_KEY_BASE=x",
        "PASSWORD1=… DB_PASSWORD_PROD=… SECRET_KEY_BASE=…",
    ),
    ("--set=db.password=ab/cd --lr 3", "--set=db.password=… --lr 3"),
    ("--env=HF_TOKEN=ab/cd", "--env=HF_TOKEN=…"),
    ("--require-password=true", "--require-password=true"),
    // Names that may say it.
    ("--hf-token hunter2 --lr 3", "--hf-token … --lr 3"),
    ("HF_TOKEN=hunter2", "HF_TOKEN=…"),
    ("--auth hunter2", "--auth …"),
    ("--auth true --auth-type oidc", "--auth true --auth-type oidc"),
    ("--use-token --lr 3", "--use-token --lr 3"),
    (
        "--max-tokens 5 --tokenizer=gpt2 token",
        "--max-tokens 5 --tokenizer=gpt2 token",
    ),
    (
        "--token-count 5 --tokens 1e9 --token 50256",
        "--token-count 5 --tokens 1e9 --token 50256",
    ),
    (
        "--pad-token <pad> --eos_token=</s>",
        "--pad-token <pad> --eos_token=</s>",
    ),
    (
        "--token-file tokens.bin --stop-token ###",
        "--token-file tokens.bin --stop-token ###",
    ),
    // Keys of other kinds.
    (
        "--sort-key loss --image-key=jpg --n-key-heads 8",
        "--sort-key loss --image-key=jpg --n-key-heads 8",
    ),
    ("--key 3f9a8b7c6d5e4f3a2b1c", "--key …"),
    ("--set key=3f9a8b7c6d5e4f3a2b1c", "--set key=…"),
    ("--key text", "--key text"),
    // Short options.
    ("mysql -p hunter2", "mysql -p …"),
    ("mysql -phunter2", "mysql -p…"),
    ("srv -p 8080 -p 80:8080 -p 1-3", "srv -p 8080 -p 80:8080 -p 1-3"),
    (
        "t.py -p bf16 -p data/x -p ./x -p true",
        "t.py -p bf16 -p data/x -p ./x -p true",
    ),
    ("mkdir -pv x", "mkdir -pv x"),
    ("curl -u me:hunter2 x", "curl -u me:… x"),
    ("curl --user me:hunter2 x", "curl --user me:… x"),
    ("pip install --user torch", "pip install --user torch"),
    ("python -u train.py", "python -u train.py"),
    // Addresses.
    (
        "--data https://me:hunter2@host/a?b=1",
        "--data https://me:…@host/a?b=1",
    ),
    (
        "s3://bucket/a?token=hunter2&page=2",
        "s3://bucket/a?token=…&page=2",
    ),
    (
        "https://h/a?X-Amz-Signature=abc&key=v",
        "https://h/a?X-Amz-Signature=…&key=…",
    ),
    (
        "https://host:80/a?page=2 git@host:a/b",
        "https://host:80/a?page=2 git@host:a/b",
    ),
    ("https://ghp3f9a8b7c6d5e4f@github.com/a", "https://…@github.com/a"),
    ("http://me@host/", "http://me@host/"),
    (
        "https://h/a?to=http://u:p@h&token=hunter2",
        "https://h/a?to=http://u:…@h&token=…",
    ),
    ("amqp://u:p@h1,amqp://u:q@h2/v", "amqp://u:…@h1,amqp://u:…@h2/v"),
    // Headers.
    ("-H Authorization: Bearer abc", "-H Authorization: Bearer …"),
    // Well-known tokens.
    ("train hf_AbCdEfGhIjKlMnOp1234", "train …"),
    ("train hf_abcdefghijklmnopqrstuv", "train …"),
    (
        "train hf_transfer_of_large_files",
        "train hf_transfer_of_large_files",
    ),
    ("--model hf_hub/llama sk-learn", "--model hf_hub/llama sk-learn"),
    // Hyperparameters.
    (
        "--lr 6e-4 --seed 1337 --model.n_head=12 --data.train train.txt --precision bf16",
        "--lr 6e-4 --seed 1337 --model.n_head=12 --data.train train.txt --precision bf16",
    ),
    ("", ""),
];

#[test]
fn secrets_of_command_lines_are_hidden_and_nothing_else() {
    for (line, shown) in LINES {
        assert_eq!(command_line(line.split(' ')).join(" "), *shown, "{line}");
    }
}

/// It overflowed the stack.
#[test]
fn pairs_within_pairs_are_followed_to_a_depth() {
    assert_eq!(
        pair(&"=".repeat(1 << 20)),
        format!("{}{HIDDEN}", "=".repeat(NESTED + 1))
    );
    assert_eq!(pair("--set=a=b=c=3"), "--set=a=b=c=3");
}

/// Words with spaces: one argument.
#[test]
fn secrets_within_one_argument_are_hidden_and_nothing_else() {
    for (line, shown) in [
        (
            ["--dsn", "host=db user=me password=hunter2"],
            ["--dsn", "host=db user=me password=…"],
        ),
        (
            ["-lc", "train --password hunter2 --lr 3"],
            ["-lc", "train --password … --lr 3"],
        ),
        (["-H", "X-Api-Key: abc"], ["-H", "X-Api-Key: …"]),
        (
            ["--conf", "{\"password\":\"x\",\"lr\":3}"],
            ["--conf", "{\"password\":…,\"lr\":3}"],
        ),
        (
            ["--conf", "{\"db_password\": \"x\", \"lr\": 3}"],
            ["--conf", "{\"db_password\": …, \"lr\": 3}"],
        ),
        (
            ["-c", "a; export HF_TOKEN=abc; b"],
            ["-c", "a; export HF_TOKEN=…; b"],
        ),
        (
            ["-c", "cd /a && python t.py --lr 3"],
            ["-c", "cd /a && python t.py --lr 3"],
        ),
        (["--note", "loss: 3, step: 4"], ["--note", "loss: 3, step: 4"]),
    ] {
        assert_eq!(command_line(line), shown);
    }
}

#[test]
fn secrets_of_configurations_and_environments_are_hidden_and_nothing_else() {
    for (name, found, shown) in [
        ("logger.api_key", "abc", "…"),
        ("data.train", "https://me:hunter2@host/a", "https://me:…@host/a"),
        ("data.tokenizer", "gpt2", "gpt2"),
        ("model.vocab_size", "50257", "50257"),
        ("data.auth", "hunter2", "…"),
        ("token_count", "5", "5"),
        ("key_dim", "64", "64"),
        ("HF_TOKEN", "hunter2", "…"),
        ("HF_TOKEN_PATH", "/srv/token", "/srv/token"),
        ("HEADERS", "Authorization: Bearer abc", "Authorization: Bearer …"),
        ("MASTER_ADDR", "10.0.0.1", "10.0.0.1"),
        ("OMP_NUM_THREADS", "4", "4"),
        ("PYTHONPATH", "/a:/b", "/a:/b"),
        ("password", "", ""),
    ] {
        assert_eq!(value(name, found), shown, "{name}");
    }
    assert_eq!(pair("a.password=b"), "a.password=…");
    assert_eq!(pair("train.lr=3e-4"), "train.lr=3e-4");
}
