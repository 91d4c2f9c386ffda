//! Token ids as uneven as those of a text: a token that comes often makes a long run of rows, which the gradient of the
//! token embedding adds up one after the other.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_worker::config::{Paths, Tokenizer};
use ddp_worker::data::{Tokens, Vocabulary};
use safetensors::tensor::{Dtype, TensorView};

/// Tokens of GPT-2.
const VOCABULARY: usize = 50_257;
/// Most ids that are kept, more than an operation here is given.
const MOST: usize = 1 << 16;

/// Ids, and where they are from in words.
pub(crate) struct TokenIds {
    pub(crate) ids: Vec<i32>,
    source: String,
}

impl TokenIds {
    /// By Zipf's law, as words of a text are: the token of rank `r` comes `1/r` as often as the first one, here 9 % of all.
    pub(crate) fn zipf() -> Self {
        let mut sum = 0.0;
        let sums: Vec<f64> = (1..=VOCABULARY)
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        // Multiples of the golden ratio lie evenly in [0, 1), and neighbours far apart.
        let golden = (5.0_f64.sqrt() - 1.0) / 2.0;
        let id = |i: usize| {
            let place = (i as f64 * golden).fract() * sum;
            sums.partition_point(|&end| end <= place).min(VOCABULARY - 1) as i32
        };
        Self {
            ids: (0..MOST).map(id).collect(),
            source: "by Zipf's law".to_owned(),
        }
    }

    /// The first ones of a file of GPT-2's tokens, as training reads it.
    pub(crate) fn of_file(path: &Path) -> Result<Self, Box<dyn Error>> {
        let vocabulary = Arc::new(Vocabulary::of(&Tokenizer::Gpt2)?);
        let paths = Paths::from(PathBuf::from(path));
        let tokens = Tokens::open(&paths, &Tokenizer::Gpt2, None, &vocabulary)?;
        let mut ids = vec![0; tokens.len().min(MOST)];
        tokens.read(0, &mut ids)?;
        Ok(Self {
            ids,
            source: format!("from `{}`", path.display()),
        })
    }

    /// The same ids by way of a file, so that a rehearsal reads one.
    pub(crate) fn through_a_file(&self) -> Result<Self, Box<dyn Error>> {
        let stored: Vec<u8> = self
            .ids
            .iter()
            .flat_map(|id| (*id as u16).to_le_bytes())
            .collect();
        let tokens = TensorView::new(Dtype::U16, vec![self.ids.len()], &stored)?;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("rehearsed.safetensors");
        std::fs::write(&path, safetensors::serialize([("tokens", tokens)], None)?)?;
        let read = Self::of_file(&path)?;
        assert_eq!(read.ids, self.ids, "other ids than were written");
        Ok(read)
    }

    /// What they are, and how often the most frequent one comes.
    pub(crate) fn description(&self) -> String {
        let mut sorted = self.ids.clone();
        sorted.sort_unstable();
        let runs = sorted.chunk_by(|a, b| a == b).map(<[i32]>::len);
        let share = 100.0 * runs.max().unwrap_or(0) as f64 / self.ids.len() as f64;
        let (count, source) = (self.ids.len(), &self.source);
        format!("{count} token ids {source}; the most frequent one is {share:.1} % of them")
    }
}
