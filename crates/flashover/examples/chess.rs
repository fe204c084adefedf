//! Learns to move in chess: a short training on random games, and then GRPO with a reward that knows the rules.
//!
//! `cargo run --release --example chess -- models/demo 20`
//!
//! A prompt is the moves so far, `e2e4 e7e5 g1f3`; a completion is the next move. The reward is 0 for a text that is no move, 0.2 for
//! one that is not legal, 0.5 for a legal one, and up to 0.5 more for what it takes.

use cozy_chess::{Board, Move, Piece};
use flashover::grpo::{Grpo, GrpoOptions, GrpoPrompt, Scored};
use flashover::train::{Example, FullOptions, Schedule, Start, Trainer};
use flashover::{Device, EngineOptions, ModelFolder, Sampling};
use serde_json::{Map, Value};

/// Moves of a game from its start.
struct Game {
    board: Board,
    moves: Vec<String>,
}

impl Game {
    /// Plays random moves; the same for one seed.
    fn random(seed: u64, plies: usize) -> Self {
        let (mut board, mut moves) = (Board::default(), Vec::new());
        for ply in 0..plies {
            let legal = legal(&board);
            let word = (seed * 31 + ply as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
            let Some(own) = legal.get(word as usize % legal.len().max(1)) else { break };
            moves.push(own.to_string());
            board.play(*own);
        }
        Self { board, moves }
    }

    fn text(&self) -> String {
        self.moves.join(" ")
    }
}

fn legal(board: &Board) -> Vec<Move> {
    let mut all = Vec::new();
    board.generate_moves(|moves| {
        all.extend(moves);
        false
    });
    all
}

/// Returns the reward of a completion after these moves.
fn reward(before: &str, completion: &str) -> f64 {
    let mut board = Board::default();
    for own in before.split(' ') {
        board.play(own.parse().expect("the prompts are legal games"));
    }
    let Some(Ok(own)) = completion.split_whitespace().next().map(str::parse::<Move>) else {
        return 0.0;
    };
    if !board.is_legal(own) {
        return 0.2;
    }
    // Castling is written as the king on its own rook.
    let other = board.color_on(own.to) == Some(!board.side_to_move());
    let taken = match board.piece_on(own.to).filter(|_| other) {
        Some(Piece::Queen) => 0.5,
        Some(Piece::Rook) => 0.3,
        Some(Piece::Bishop | Piece::Knight) => 0.2,
        Some(_) => 0.1,
        None => 0.0,
    };
    0.5 + taken
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("a model")?;
    let batches: u64 = args.next().ok_or("a number of batches")?.parse()?;

    let folder = ModelFolder::open(&model)?;
    let encode = |text: &str| folder.encode(text);
    // Random games teach the notation of moves.
    let mut lessons = Vec::new();
    for seed in 0..256 {
        let game = Game::random(seed, 6);
        let tokens = encode(&format!("{} ", game.text()))?;
        lessons.push(Example { tokens, from: 0 });
    }
    let mut prompts = Vec::new();
    for seed in 0..64 {
        let game = Game::random(1000 + seed, 3);
        assert!(!legal(&game.board).is_empty());
        let fields = Map::from_iter([("moves".to_owned(), Value::from(game.text()))]);
        let (text, tokens) = (game.text(), encode(&game.text())?);
        prompts.push(GrpoPrompt { tokens, text, line: seed as usize + 1, fields });
    }

    let start = Start::Folder(Box::new(folder));
    let options = FullOptions { schedule: Schedule::constant(3e-4), ..FullOptions::default() };
    let mut trainer = Trainer::full(&Device::auto()?, start, &EngineOptions::default(), options)?;
    for step in 0..40 {
        let lesson = lessons.iter().cycle().skip(16 * step).take(16).cloned().collect();
        let loss = trainer.step(&[lesson])?.loss;
        if step % 10 == 0 {
            println!("lesson {step}: loss {loss:.3}");
        }
    }

    let score = |own: &Scored<'_>| Some(reward(own.prompt, own.completion));
    let options = GrpoOptions {
        group: 8,
        max_new_tokens: 8,
        sampling: Sampling { temperature: 1.0, ..Sampling::default() },
        micro_batch: 32,
        ..GrpoOptions::default()
    };
    let mut grpo = Grpo::new(trainer, vec![score.into()], options)?;
    for batch in 0..batches {
        let some: Vec<_> =
            prompts.iter().cycle().skip(8 * batch as usize).take(8).cloned().collect();
        let report = grpo.step(&some)?;
        let (best, reward) = (&report.samples[0], report.drawing.and_then(|own| own.reward));
        println!(
            "batch {batch}: reward {:.3}, best {}|{}",
            reward.unwrap_or(f64::NAN),
            best.prompt,
            best.completion
        );
    }
    Ok(())
}
