//! A disk that remembers each of its steps, and what a loss of power after any of them may leave.
//!
//! A name in a folder is certain when the folder was synced since, the content of a file when the file was. What is not
//! certain may be there or not, each change of a folder by itself, and of a file's new content any part may be missing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use super::*;

/// The files and folders below the base, by path; a folder has no content.
pub(super) type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// One change that a crash may come after. Paths are below the base.
#[derive(Clone, Debug)]
enum Step {
    Folder(PathBuf),
    /// A new file, or one whose content goes.
    Empty(PathBuf),
    Append(PathBuf, Vec<u8>),
    SyncFile(PathBuf),
    SyncFolder(PathBuf),
    Rename(PathBuf, PathBuf),
    /// A file, or a folder with nothing in it.
    Unlink(PathBuf),
}

/// Does everything on the disk too, and notes it down. An operation that is to fail does nothing, but that a write leaves
/// the half that fitted.
pub(super) struct Journal {
    base: PathBuf,
    before: Tree,
    /// By the number of the operation.
    fails: Box<dyn Fn(usize) -> bool + Send + Sync>,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    steps: Vec<Step>,
    operations: usize,
    /// Steps before the first operation that failed.
    failed: Option<usize>,
}

impl Journal {
    /// Of what happens below `base` from now on; what is there is certain.
    pub(super) fn new(base: &Path) -> Arc<Self> {
        Self::failing(base, |_| false)
    }

    pub(super) fn failing(base: &Path, fails: impl Fn(usize) -> bool + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            base: base.to_owned(),
            before: read_tree(base),
            fails: Box::new(fails),
            notes: Mutex::default(),
        })
    }

    /// Steps before the first operation that was made to fail.
    pub(super) fn failed(&self) -> Option<usize> {
        self.notes.lock().unwrap().failed
    }

    /// What a loss of power may leave after `from` steps and each of those behind, each tree once, with the number of the
    /// steps before it. The last number is that of all steps.
    pub(super) fn outcomes(&self, from: usize) -> Vec<(usize, Tree)> {
        let notes = self.notes.lock().unwrap();
        let mut disk = Platter::holding(&self.before);
        let mut seen = BTreeSet::new();
        let mut all = Vec::new();
        for done in 0..=notes.steps.len() {
            if let Some(step) = done.checked_sub(1).map(|last| &notes.steps[last]) {
                disk.apply(step);
            }
            if done == notes.steps.len() {
                // All that may be left of what has said that it is done.
                seen.clear();
            }
            if done < from {
                continue;
            }
            for tree in disk.outcomes() {
                if seen.insert(tree.clone()) {
                    all.push((done, tree));
                }
            }
        }
        all
    }

    pub(super) fn steps(&self) -> usize {
        self.notes.lock().unwrap().steps.len()
    }

    /// What an operation changes, before it happens.
    fn changes(&self, step: DiskStep<'_>) -> Vec<Step> {
        let mut steps = Vec::new();
        match step {
            DiskStep::CreateFolder(path) => {
                let mut missing: Vec<&Path> =
                    path.ancestors().take_while(|folder| !folder.exists()).collect();
                missing.reverse();
                steps.extend(missing.into_iter().map(|folder| Step::Folder(self.below(folder))));
            }
            DiskStep::Write(path, content) => {
                steps.push(Step::Empty(self.below(path)));
                steps.push(Step::Append(self.below(path), content.to_vec()));
            }
            DiskStep::Append(path, bytes) => steps.push(Step::Append(self.below(path), bytes.to_vec())),
            DiskStep::SyncFile(path) => steps.push(Step::SyncFile(self.below(path))),
            // Folders above the base were there before.
            DiskStep::SyncFolder(path) => {
                let below = path.strip_prefix(&self.base);
                steps.extend(below.map(|path| Step::SyncFolder(path.to_owned())));
            }
            DiskStep::Rename(from, to) => steps.push(Step::Rename(self.below(from), self.below(to))),
            DiskStep::RemoveFile(path) if !path.exists() => {}
            DiskStep::RemoveFile(path) => steps.push(Step::Unlink(self.below(path))),
            DiskStep::RemoveFolder(path) => self.unlinks(path, &mut steps),
        }
        steps
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.base).expect("below the base").to_owned()
    }

    /// The steps that delete all of a folder, what is in it first.
    fn unlinks(&self, path: &Path, steps: &mut Vec<Step>) {
        if !path.exists() {
            return;
        }
        for name in names(path) {
            let inner = path.join(name);
            if inner.is_dir() {
                self.unlinks(&inner, steps);
            } else {
                steps.push(Step::Unlink(self.below(&inner)));
            }
        }
        steps.push(Step::Unlink(self.below(path)));
    }
}

impl Storage for Journal {
    fn perform(&self, step: DiskStep<'_>) -> io::Result<()> {
        let mut notes = self.notes.lock().unwrap();
        notes.operations += 1;
        let act = |step: DiskStep<'_>| match step {
            DiskStep::SyncFile(path) if !path.is_file() => Err(io::ErrorKind::NotFound.into()),
            DiskStep::SyncFile(_) | DiskStep::SyncFolder(_) => Ok(()),
            step => Disk.perform(step),
        };
        if (self.fails)(notes.operations - 1) {
            notes.failed = notes.failed.or(Some(notes.steps.len()));
            let half = match step {
                DiskStep::Write(path, bytes) => Some(DiskStep::Write(path, &bytes[..bytes.len() / 2])),
                DiskStep::Append(path, bytes) => Some(DiskStep::Append(path, &bytes[..bytes.len() / 2])),
                _ => None,
            };
            if let Some(half) = half {
                let steps = self.changes(half);
                if act(half).is_ok() {
                    notes.steps.extend(steps);
                }
            }
            return Err(io::Error::new(io::ErrorKind::StorageFull, "failed by the test"));
        }
        let steps = self.changes(step);
        act(step)?;
        notes.steps.extend(steps);
        Ok(())
    }
}

/// The files and folders below a folder.
fn read_tree(base: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut open = vec![base.to_owned()];
    while let Some(folder) = open.pop() {
        for name in names(&folder) {
            let path = folder.join(name);
            let below = path.strip_prefix(base).unwrap().to_owned();
            if path.is_dir() {
                tree.insert(below, None);
                open.push(path);
            } else {
                tree.insert(below, Some(fs::read(&path).unwrap()));
            }
        }
    }
    tree
}

/// Makes the tree in a folder of its own.
pub(super) fn make(tree: &Tree) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    // A folder comes before what is in it.
    for (path, content) in tree {
        let path = folder.path().join(path);
        match content {
            None => fs::create_dir(&path).unwrap(),
            Some(content) => fs::write(&path, content).unwrap(),
        }
    }
    folder
}

type Node = usize;
const BASE: Node = 0;

/// Files and folders apart from their names, as a disk has them.
struct Platter(Vec<Inode>);

enum Inode {
    File {
        certain: Vec<u8>,
        now: Vec<u8>,
    },
    Folder {
        certain: BTreeMap<String, Node>,
        changes: Vec<Vec<Change>>,
    },
}

/// A name in a folder, and what it stands for from now on.
type Change = (String, Option<Node>);

/// What is left of content that is not certain.
#[derive(Clone, Copy)]
enum Rest {
    Nothing,
    Half,
    Zeros,
    All,
}

impl Platter {
    fn holding(tree: &Tree) -> Self {
        let mut disk = Self(vec![Inode::Folder {
            certain: BTreeMap::new(),
            changes: Vec::new(),
        }]);
        for (path, content) in tree {
            let inode = match content {
                Some(content) => Inode::File {
                    certain: content.clone(),
                    now: content.clone(),
                },
                None => Inode::Folder {
                    certain: BTreeMap::new(),
                    changes: Vec::new(),
                },
            };
            disk.enter(path, inode);
        }
        disk.settle_all();
        disk
    }

    fn settle_all(&mut self) {
        (0..self.0.len()).for_each(|node| self.settle(node));
    }

    /// What a folder names now.
    fn names(&self, folder: Node) -> BTreeMap<String, Node> {
        let Inode::Folder { certain, changes } = &self.0[folder] else {
            panic!("node {folder} is no folder")
        };
        after(certain, changes.iter())
    }

    fn find(&self, path: &Path) -> Option<Node> {
        path.iter().try_fold(BASE, |folder, name| {
            self.names(folder).get(name.to_str().unwrap()).copied()
        })
    }

    fn change(&mut self, folder: &Path, change: Vec<Change>) {
        let folder = self
            .find(folder)
            .unwrap_or_else(|| panic!("no folder {folder:?}"));
        let Inode::Folder { changes, .. } = &mut self.0[folder] else {
            panic!("node {folder} is no folder")
        };
        changes.push(change);
    }

    fn enter(&mut self, path: &Path, inode: Inode) {
        self.0.push(inode);
        let node = self.0.len() - 1;
        self.change(path.parent().unwrap(), vec![(name_of(path), Some(node))]);
    }

    /// Makes all of a file or folder certain.
    fn settle(&mut self, node: Node) {
        match &mut self.0[node] {
            Inode::File { certain, now } => certain.clone_from(now),
            Inode::Folder { certain, changes } => {
                *certain = after(certain, changes.iter());
                changes.clear();
            }
        }
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Folder(path) => self.enter(
                path,
                Inode::Folder {
                    certain: BTreeMap::new(),
                    changes: Vec::new(),
                },
            ),
            Step::Empty(path) => match self.find(path) {
                Some(node) => self.content(node).clear(),
                None => self.enter(
                    path,
                    Inode::File {
                        certain: Vec::new(),
                        now: Vec::new(),
                    },
                ),
            },
            Step::Append(path, bytes) => {
                let node = self.find(path).unwrap();
                self.content(node).extend(bytes);
            }
            Step::SyncFile(path) | Step::SyncFolder(path) => {
                let node = self.find(path).unwrap();
                self.settle(node);
            }
            Step::Rename(from, to) => {
                let node = self.find(from);
                let (old, new) = ((name_of(from), None), (name_of(to), node));
                let (left, entered) = (from.parent().unwrap(), to.parent().unwrap());
                if left == entered {
                    self.change(left, vec![old, new]);
                } else {
                    self.change(left, vec![old]);
                    self.change(entered, vec![new]);
                }
            }
            Step::Unlink(path) => self.change(path.parent().unwrap(), vec![(name_of(path), None)]),
        }
    }

    fn content(&mut self, node: Node) -> &mut Vec<u8> {
        match &mut self.0[node] {
            Inode::File { now, .. } => now,
            Inode::Folder { .. } => panic!("node {node} is no file"),
        }
    }

    /// What a loss of power may leave now.
    fn outcomes(&self) -> BTreeSet<Tree> {
        let mut folders: Vec<BTreeMap<Node, BTreeMap<String, Node>>> = vec![BTreeMap::new()];
        for (node, inode) in self.0.iter().enumerate() {
            let Inode::Folder { certain, changes } = inode else {
                continue;
            };
            let kept: BTreeSet<_> = subsets(changes.len())
                .into_iter()
                .map(|kept| {
                    after(
                        certain,
                        changes
                            .iter()
                            .zip(kept)
                            .filter_map(|(change, kept)| kept.then_some(change)),
                    )
                })
                .collect();
            let with = |folders: &BTreeMap<_, _>, names: &BTreeMap<String, Node>| {
                let mut folders = folders.clone();
                folders.insert(node, names.clone());
                folders
            };
            folders = folders
                .iter()
                .flat_map(|folders| kept.iter().map(move |names| with(folders, names)))
                .collect();
        }
        let rests = [Rest::Nothing, Rest::Half, Rest::Zeros, Rest::All];
        let trees = folders
            .iter()
            .flat_map(|folders| rests.map(|rest| self.tree(folders, rest)));
        trees.collect()
    }

    fn tree(&self, folders: &BTreeMap<Node, BTreeMap<String, Node>>, rest: Rest) -> Tree {
        let mut tree = Tree::new();
        let mut open = vec![(PathBuf::new(), BASE)];
        while let Some((path, folder)) = open.pop() {
            for (name, &node) in &folders[&folder] {
                let path = path.join(name);
                match &self.0[node] {
                    Inode::File { certain, now } => {
                        tree.insert(path, Some(remains(certain, now, rest)));
                    }
                    Inode::Folder { .. } => {
                        tree.insert(path.clone(), None);
                        open.push((path, node));
                    }
                }
            }
        }
        tree
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

fn after<'a>(
    certain: &BTreeMap<String, Node>,
    changes: impl Iterator<Item = &'a Vec<Change>>,
) -> BTreeMap<String, Node> {
    let mut names = certain.clone();
    for (name, node) in changes.flatten() {
        match node {
            Some(node) => names.insert(name.clone(), *node),
            None => names.remove(name),
        };
    }
    names
}

/// Which of so many changes are kept: every choice of a few; of many the first so many, each one alone, and all but one.
fn subsets(changes: usize) -> Vec<Vec<bool>> {
    const FEW: usize = 4;
    if changes <= FEW {
        return (0..1_u32 << changes)
            .map(|bits| (0..changes).map(|i| bits >> i & 1 == 1).collect())
            .collect();
    }
    let row = |keeps: &dyn Fn(usize) -> bool| (0..changes).map(keeps).collect();
    let of = |chosen: usize| [row(&|i| i < chosen), row(&|i| i == chosen), row(&|i| i != chosen)];
    (0..=changes).flat_map(of).collect()
}

fn remains(certain: &[u8], now: &[u8], rest: Rest) -> Vec<u8> {
    if certain == now {
        return now.to_vec();
    }
    match rest {
        Rest::Nothing => certain.to_vec(),
        Rest::Half => now[..now.len() / 2].to_vec(),
        Rest::Zeros => vec![0; now.len()],
        Rest::All => now.to_vec(),
    }
}
