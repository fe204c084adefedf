//! Files of tokens.
//!
//! | file | content |
//! |---|---|
//! | raw | tokens of 16 bits, or of 32 bits for a vocabulary above 65,536: nanoGPT's `train.bin` |
//! | with a header | 256 words of 32 bits, then tokens: llm.c's shards of GPT-2 (16 bits) and Llama 3 (32 bits) |
//!
//! All numbers are little-endian. A file is cut into windows: inputs of `context` tokens, and the token after each.

use std::fs::{self, DirEntry, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use models::Example;

use super::data::DatasetError;
use crate::fnv::Fnv1a;

/// Windows of the tokens of one or more files. They are read when they are needed.
#[derive(Debug)]
pub(super) struct Shards {
    context: usize,
    shards: Vec<Shard>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
    /// Bytes in front of the tokens.
    header: u64,
    /// Bytes per token: 2 or 4.
    size: usize,
    tokens: usize,
    windows: usize,
    /// Hash of the tokens.
    hash: Fnv1a,
}

/// llm.c's header: bytes, and the first two words for tokens of 16 and of 32 bits.
const HEADER: usize = 1024;
const NARROW: [u32; 2] = [20_240_520, 1];
const WIDE: [u32; 2] = [20_240_801, 7];

impl Shards {
    /// Opens a `.bin` file, or all those of a folder in the order of their names, and checks every token.
    pub(super) fn open(path: &Path, context: usize, vocab: usize) -> Result<Self, DatasetError> {
        let read = |why| DatasetError::Read { path: path.to_owned(), why };
        let mut paths = vec![path.to_owned()];
        if path.is_dir() {
            let entries = fs::read_dir(path).map_err(read)?;
            let entries = entries.collect::<Result<Vec<_>, _>>().map_err(read)?;
            paths = entries.iter().map(DirEntry::path).filter(|path| is_bin(path)).collect();
            paths.sort();
            if paths.is_empty() {
                return Err(DatasetError::Empty(path.to_owned()));
            }
        }
        let shards = paths.into_iter().map(|path| Shard::open(path, context, vocab));
        let shards = shards.collect::<Result<Vec<_>, _>>()?;
        match shards.iter().map(|shard| shard.tokens).max() {
            Some(tokens) if tokens <= context => {
                Err(DatasetError::Short { path: path.to_owned(), tokens, context })
            }
            _ => Ok(Self { context, shards }),
        }
    }

    /// Returns the files, in their order.
    pub(super) fn paths(&self) -> Vec<&Path> {
        self.shards.iter().map(|shard| shard.path.as_path()).collect()
    }

    /// Returns a hash of all tokens.
    pub(super) fn hash(&self) -> u64 {
        let mut hash = Fnv1a::new();
        self.shards.iter().for_each(|shard| hash.add(shard.hash.value()));
        hash.value()
    }

    /// Returns the number of windows.
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.windows).sum()
    }

    /// Returns the number of inputs of a window.
    pub(super) const fn context(&self) -> usize {
        self.context
    }

    /// Reads a window shifted by `shift` tokens, clamped to the end of its file.
    pub(super) fn get(&self, mut index: usize, shift: usize) -> Result<Example, DatasetError> {
        for shard in &self.shards {
            if index < shard.windows {
                let last = shard.tokens - (self.context + 1);
                let from = (index * self.context + shift).min(last);
                let tokens = shard.read(from, self.context + 1);
                let tokens =
                    tokens.map_err(|why| DatasetError::Read { path: shard.path.clone(), why })?;
                return Ok(Example { tokens, from: 0 });
            }
            index -= shard.windows;
        }
        panic!("a window past the last")
    }
}

/// Returns true for the name of a file of tokens.
pub(super) fn is_bin(path: &Path) -> bool {
    path.extension().is_some_and(|own| own.eq_ignore_ascii_case("bin"))
}

impl Shard {
    fn open(path: PathBuf, context: usize, vocab: usize) -> Result<Self, DatasetError> {
        if !is_bin(&path) {
            return Err(DatasetError::NoTokens(path));
        }
        let read = |why| DatasetError::Read { path: path.clone(), why };
        let bad_file = |why: String, hint| DatasetError::Shard { path: path.clone(), why, hint };
        let bad = |why| {
            bad_file(why, "store token ids as u16 for a vocabulary of up to 65,536, else as u32")
        };
        // Opening a pipe waits for its writer.
        checkpoint::ends(&path).map_err(read)?;
        let mut file = File::open(&path).map_err(read)?;
        let bytes = file.metadata().map_err(read)?.len();
        let mut head = [0; HEADER];
        let long = bytes >= HEADER as u64;
        if long {
            file.read_exact(&mut head).map_err(read)?;
        }
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| head[4 * at + byte]));
        let (header, size) = match [word(0), word(1)] {
            NARROW if long => (HEADER as u64, 2),
            WIDE if long => (HEADER as u64, 4),
            _ => (0, if vocab > 1 << 16 { 4 } else { 2 }),
        };
        let tokens = (bytes - header) / size as u64;
        if (bytes - header) % size as u64 != 0 {
            let bits = 8 * size;
            return Err(bad(format!(
                "expected a multiple of {size} bytes (u{bits} tokens), got {bytes}"
            )));
        }
        if header > 0 && tokens != u64::from(word(2)) {
            let why = format!("the header says {} tokens, the file has {tokens}", word(2));
            return Err(bad_file(why, "copy the file again: it is cut"));
        }
        let windows = (tokens.saturating_sub(1) / context.max(1) as u64) as usize;
        let whole = tokens as usize;
        let (path, hash) = (path.clone(), Fnv1a::new());
        let mut shard = Self { path, file, header, size, tokens: whole, windows, hash };
        // Tokens at odd places are the upper halves of 32-bit ones.
        let (mut at, mut lower, mut upper) = (0, 0, 0);
        while at < tokens {
            let count = (tokens - at).min(1 << 20);
            let own = shard.read(at as usize, count as usize).map_err(read)?;
            if let Some(past) = own.iter().position(|token| *token as usize >= vocab) {
                let (token, place) = (own[past], at + past as u64);
                return Err(bad(format!(
                    "token {token} at position {place} is past the vocabulary of {vocab}"
                )));
            }
            own.iter().for_each(|token| shard.hash.add(*token));
            for pair in own.chunks(2) {
                lower |= pair[0];
                upper |= pair.get(1).copied().unwrap_or(0);
            }
            at += count;
        }
        if tokens > 1 && upper == 0 && lower == 0 {
            return Err(bad_file(
                "all tokens are 0".to_owned(),
                "write the tokens before training",
            ));
        }
        match header == 0 && size == 2 && tokens > 1 && upper == 0 {
            true => Err(bad("every second token is 0, as if tokens had 32 bits".to_owned())),
            false => Ok(shard),
        }
    }

    fn read(&self, from: usize, count: usize) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; count * self.size];
        let at = self.header + (from * self.size) as u64;
        self.file.read_exact_at(&mut bytes, at)?;
        let narrow = |own: &[u8]| u32::from(u16::from_le_bytes([own[0], own[1]]));
        let wide = |own: &[u8]| u32::from_le_bytes([own[0], own[1], own[2], own[3]]);
        Ok(match self.size {
            2 => bytes.chunks_exact(2).map(narrow).collect(),
            _ => bytes.chunks_exact(4).map(wide).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(tokens: &[u16]) -> Vec<u8> {
        tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
    }

    #[test]
    fn windows_overlap_by_one_token() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("a.bin"), bytes(&[0, 1, 2, 3, 4, 5, 6, 7, 8])).expect("written");
        let mut head = [0; HEADER];
        for (at, word) in [NARROW[0], NARROW[1], 5].into_iter().enumerate() {
            head[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes());
        }
        let shard = [&head[..], &bytes(&[10, 11, 12, 13, 14])].concat();
        fs::write(path("b.bin"), &shard).expect("written");
        fs::write(path("notes.txt"), "no tokens").expect("written");
        let shards = Shards::open(folder.path(), 4, 100).expect("tokens");
        assert_eq!(shards.len(), 3);
        let of = |index, shift| shards.get(index, shift).expect("readable").tokens;
        assert_eq!(of(0, 0), [0, 1, 2, 3, 4]);
        assert_eq!(of(1, 0), [4, 5, 6, 7, 8]);
        assert_eq!(of(2, 0), [10, 11, 12, 13, 14]);
        assert_eq!(of(0, 3), [3, 4, 5, 6, 7]);
        assert_eq!((of(1, 3), of(2, 3)), (of(1, 0), of(2, 0)), "the last of their files");
        let refused = |name: &str, bytes: &[u8], vocab| {
            fs::write(path(name), bytes).expect("written");
            Shards::open(&path(name), 4, vocab).expect_err("refused").to_string()
        };
        let odd = refused("odd.bin", &[0; 9], 100);
        assert!(odd.contains("expected a multiple of 2 bytes (u16 tokens), got 9"), "{odd}");
        let cut = refused("cut.bin", &shard[..shard.len() - 2], 100);
        assert!(cut.contains("the header says 5 tokens, the file has 4"), "{cut}");
        let past = refused("past.bin", &bytes(&[1, 2, 3, 4, 100]), 100);
        assert!(past.contains("token 100 at position 4 is past the vocabulary of 100"), "{past}");
        let short = refused("short.bin", &bytes(&[1, 2, 3, 4]), 100);
        assert!(short.contains("has 4 tokens, expected at least 5"), "{short}");
        let wide: Vec<u8> = (1..9u32).flat_map(u32::to_le_bytes).collect();
        let wide = refused("wide.bin", &wide, 100);
        assert!(wide.contains("as if tokens had 32 bits"), "{wide}");
        let pointer = refused("pointer.bin", b"version https://git-lfs.github.com/spec/v1\n", 100);
        assert!(pointer.contains("git-lfs pointer"), "{pointer}");
        let text = refused("text.txt", &bytes(&[1, 2, 3, 4, 5]), 100);
        assert!(text.contains("text.txt is not a .bin"), "{text}");
        let made = std::process::Command::new("mkfifo").arg(path("pipe.bin")).status();
        assert!(made.expect("it runs").success());
        let pipe = Shards::open(&path("pipe.bin"), 4, 100).expect_err("a pipe").to_string();
        assert!(pipe.contains("it is not a file"), "{pipe}");
        fs::create_dir(path("empty")).expect("made");
        let empty = Shards::open(&path("empty"), 4, 100).expect_err("empty").to_string();
        assert!(empty.contains("empty has no .bin"), "{empty}");
        // One other token gives another hash, wherever it is.
        let hash = |tokens: &[u16]| {
            fs::write(path("hash.bin"), bytes(tokens)).expect("written");
            Shards::open(&path("hash.bin"), 4, 100).expect("tokens").hash()
        };
        let mut tokens = vec![7; 100];
        let first = hash(&tokens);
        assert_eq!(hash(&tokens), first);
        tokens[98] = 8;
        assert_ne!(hash(&tokens), first);
    }
}
