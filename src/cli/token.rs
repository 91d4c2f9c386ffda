//! Where the token of a job comes from: DDP_TOKEN, the file of DDP_TOKEN_FILE, or the file in the user's own folder,
//! which the node that hosts the rendezvous makes if it is missing. It is never on a command line, which every user of
//! a machine can read.

use std::fs::{DirBuilder, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ddp_proto::env::{DDP_TOKEN, DDP_TOKEN_FILE};
use ddp_proto::trust::token::{BadToken, MAX_CHARS, Token};
use tokio::time::{Instant, sleep};

use super::answer::print_own;
use super::error::CliError;

/// Pause between two looks for a file that another node is to make.
const LOOK: Duration = Duration::from_millis(200);
/// A wait that is worth a message.
const SILENCE: Duration = Duration::from_secs(3);

/// Where to look for the token.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// DDP_TOKEN has it.
    Variable(String),
    /// The file that DDP_TOKEN_FILE names. Its folder is there, or the path is mistyped.
    File(PathBuf),
    /// The file in the user's own folder, which may have to be made too.
    Home(PathBuf),
    /// There is no such variable, and no home either.
    Nowhere,
}

/// Without the token.
impl std::fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Variable(_) => f.write_str(DDP_TOKEN),
            Self::File(path) | Self::Home(path) => write!(f, "{}", path.display()),
            Self::Nowhere => f.write_str("nowhere"),
        }
    }
}

impl TokenSource {
    /// By the variables of this process.
    pub fn find(get_env: impl Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| get_env(name).filter(|value| !value.is_empty());
        if let Some(token) = given(DDP_TOKEN) {
            return Self::Variable(token);
        }
        if let Some(path) = given(DDP_TOKEN_FILE) {
            return Self::File(path.into());
        }
        let absolute = |path: String| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
        let config = given("XDG_CONFIG_HOME").and_then(absolute);
        let home = || given("HOME").and_then(absolute).map(|home| home.join(".config"));
        match config.or_else(home) {
            Some(config) => Self::Home(config.join("ddp-run").join("token")),
            None => Self::Nowhere,
        }
    }

    /// The token; none where its file is missing.
    pub fn read(&self) -> Result<Option<Token>, CliError> {
        match self {
            Self::Nowhere => Err(CliError::NoToken {
                place: String::new(),
                waited: Duration::ZERO,
            }),
            Self::Variable(text) => Token::parse(text).map(Some).map_err(|error| CliError::BadToken {
                place: DDP_TOKEN.into(),
                problem: words_of(error, FOR_NODES),
            }),
            Self::File(path) | Self::Home(path) => read_file(path, FOR_NODES),
        }
    }

    /// The token, which is made where its file is missing. Of several nodes that do so, one makes it, and says so.
    pub fn read_or_make(&self) -> Result<Token, CliError> {
        self.read_or_make_telling(print_own)
    }

    /// The same; what is said goes to `tell`.
    pub fn read_or_make_telling(&self, tell: impl FnOnce(&str)) -> Result<Token, CliError> {
        if let Some(token) = self.read()? {
            return Ok(token);
        }
        let (Self::File(path) | Self::Home(path)) = self else {
            return Err(self.missing(Duration::ZERO));
        };
        let made = make_file(path, matches!(self, Self::Home(_)));
        let is_ours = made.map_err(|source| CliError::MakeToken {
            path: path.clone(),
            source,
        })?;
        if is_ours {
            tell(&format!("made a new token: {}", path.display()));
        }
        self.read()?.ok_or_else(|| self.missing(Duration::ZERO))
    }

    /// The token, for which another node of a shared home may still have to make the file.
    pub async fn wait(&self, patience: Duration) -> Result<Token, CliError> {
        let begun = Instant::now();
        let mut is_told = false;
        loop {
            if let Some(token) = self.read()? {
                return Ok(token);
            }
            let waited = begun.elapsed();
            if waited >= patience {
                return Err(self.missing(waited));
            }
            if waited >= SILENCE.min(patience / 2) && !is_told {
                is_told = true;
                eprintln!(
                    "[ddp-run] waiting for the token file `{self:?}`, which the node that hosts the rendezvous makes"
                );
            }
            sleep(LOOK.min(patience.saturating_sub(waited))).await;
        }
    }

    fn missing(&self, waited: Duration) -> CliError {
        let place = format!("{self:?}");
        CliError::NoToken { place, waited }
    }
}

/// The token in a file that has to exist.
pub fn read_token_file(path: &Path) -> Result<Token, CliError> {
    let missing = || CliError::BadToken {
        place: path.display().to_string(),
        problem: format!("there is no such file\n  hint: {FOR_READERS}"),
    };
    read_file(path, FOR_READERS)?.ok_or_else(missing)
}

/// How to make a token of each kind.
const FOR_NODES: &str = "make a token with `openssl rand -hex 32`, and give it to all nodes of the job";
const FOR_READERS: &str =
    "make one with `(umask 077; openssl rand -hex 32 > FILE)`, other than that of the nodes";

fn read_file(path: &Path, hint: &str) -> Result<Option<Token>, CliError> {
    let refused = |problem: String| CliError::BadToken {
        place: path.display().to_string(),
        problem,
    };
    let file = match OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)
    {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| refused(error.to_string()))?,
    };
    let data = file.metadata().map_err(|error| refused(error.to_string()))?;
    check_owner(&data, nix::unistd::geteuid().as_raw()).map_err(refused)?;
    let mut text = String::new();
    let longest = MAX_CHARS as u64 + 2;
    file.take(longest)
        .read_to_string(&mut text)
        .map_err(|error| refused(error.to_string()))?;
    let token = Token::parse(&text).map_err(|error| refused(words_of(error, hint)))?;
    Ok(Some(token))
}

fn words_of(error: BadToken, hint: &str) -> String {
    format!("{error}\n  hint: {hint}")
}

/// No other user may read the file of a process of the user `own`. Root may give it to a group, as Kubernetes does.
fn check_owner(data: &Metadata, own: u32) -> Result<(), String> {
    let (mode, owner) = (data.mode() & 0o777, data.uid());
    let open_to = if owner == 0 { 0o027 } else { 0o077 };
    if !data.is_file() {
        Err("it is not a file".into())
    } else if owner != own && owner != 0 {
        Err(format!(
            "it belongs to user {owner}, and this process to user {own}\n  hint: make a copy of your own with `install -m 600 FILE COPY`"
        ))
    } else if mode & open_to != 0 {
        Err(format!(
            "other users can read or write it (mode {mode:03o})\n  hint: `chmod 600` it, and make a new one if others may have read it"
        ))
    } else {
        Ok(())
    }
}

/// Makes the file, and on request its folder: false if another process is faster. It is never seen without its content.
fn make_file(path: &Path, with_folder: bool) -> io::Result<bool> {
    let folder = ddp_proto::paths::folder_of(path);
    if with_folder {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let draft = folder.join(format!(".token.{:016x}", rand::random::<u64>()));
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)?;
    let written = file
        .write_all(format!("{}\n", Token::random().reveal()).as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::hard_link(&draft, path));
    // What is left behind where this fails is no token.
    let _ = std::fs::remove_file(&draft);
    match written {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        done => done.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Mutex;

    use super::*;

    fn source(variables: &[(&str, &str)]) -> TokenSource {
        TokenSource::find(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_variable_goes_before_the_file_and_the_file_before_the_home() {
        let all = [
            ("HOME", "/h/a"),
            ("XDG_CONFIG_HOME", "/config"),
            (DDP_TOKEN_FILE, "/run/token"),
            (DDP_TOKEN, "secret"),
        ];
        let expected = [
            "/h/a/.config/ddp-run/token",
            "/config/ddp-run/token",
            "/run/token",
            "DDP_TOKEN",
        ];
        for (given, expected) in (1..).zip(expected) {
            assert_eq!(format!("{:?}", source(&all[..given])), expected);
        }
        assert_eq!(
            source(&[("HOME", "relative"), (DDP_TOKEN, "")]),
            TokenSource::Nowhere
        );
    }

    #[test]
    fn it_is_made_once_and_only_for_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/folder/token");
        let source = TokenSource::Home(path.clone());
        assert!(source.read().unwrap().is_none());
        let told = Mutex::new(Vec::new());
        let tell = |words: &str| told.lock().unwrap().push(words.to_owned());
        let made: Vec<String> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| source.read_or_make_telling(tell).unwrap()))
                .collect();
            makers
                .into_iter()
                .map(|maker| maker.join().unwrap().reveal().to_owned())
                .collect()
        });
        assert!(made.iter().all(|token| *token == made[0]));
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let told = told.into_inner().unwrap();
        assert_eq!(told, [format!("made a new token: {}", path.display())]);
    }

    /// A mistyped path became a folder with a token that no other node had.
    #[test]
    fn the_folder_of_a_file_that_was_named_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let named = TokenSource::File(dir.path().join("typo/token"));
        let error = named.read_or_make().unwrap_err();
        assert!(matches!(error, CliError::MakeToken { .. }), "{error}");
        assert!(!dir.path().join("typo").exists());
    }

    #[test]
    fn a_file_of_another_user_is_refused_with_how_to_copy_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
        // Where root runs the tests: a file of root is everybody's.
        let is_given = std::os::unix::fs::chown(file.path(), Some(1234), None).is_ok();
        let data = file.path().metadata().unwrap();
        check_owner(&data, data.uid()).unwrap();
        if is_given || data.uid() != 0 {
            let words = check_owner(&data, data.uid() + 1).unwrap_err();
            let hint = "\n  hint: make a copy of your own with `install -m 600 FILE COPY`";
            assert!(words.contains(hint), "{words}");
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let source = TokenSource::File(path.clone());
        source.read_or_make().unwrap();
        let words = |source: &TokenSource| {
            let error = source.read().unwrap_err();
            assert_eq!(error.exit_code(), ddp_proto::exit::REFUSED);
            error.to_string()
        };
        for mode in [0o604, 0o602, 0o666] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert!(words(&source).contains("other users can read or write it"));
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert!(
            words(&source).contains("it has 5 characters"),
            "{}",
            words(&source)
        );
        assert!(words(&TokenSource::File(dir.path().to_owned())).contains("it is not a file"));
    }

    #[tokio::test]
    async fn another_node_waits_for_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let source = TokenSource::File(dir.path().join("token"));
        let error = source.wait(Duration::from_millis(10)).await.unwrap_err();
        assert!(error.to_string().starts_with("there is no token at `"), "{error}");
        let patience = Duration::from_mins(1);
        let waiting = source.wait(patience);
        tokio::pin!(waiting);
        let pending = tokio::time::timeout(Duration::from_millis(1), &mut waiting).await;
        assert!(pending.is_err(), "no file yet");
        let made = source.read_or_make().unwrap();
        assert_eq!(waiting.await.unwrap().reveal(), made.reveal());
    }
}
