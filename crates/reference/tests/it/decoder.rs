use reference::{
    Activation, Block, Decoder, Distribution, Error, Linear, NormRule, Rotary, Stretch, fill,
};

const SEQ: usize = 9;

fn linear(seed: u64, n: usize, k: usize) -> Linear {
    let weight = fill(seed, n * k, Distribution::Normal);
    let weight = weight.iter().map(|value| value / (k as f32).sqrt()).collect();
    Linear { weight, bias: Some(fill(seed + 1, n, Distribution::Normal)) }
}

fn rotary(stretch: Stretch) -> Rotary {
    Rotary { base: 100.0, dims: 4, stretch, magnitude: 1.0 }
}

/// Two blocks: hidden 8, 4 query heads of 6 over 2 key-value heads, ffn_hidden 5, vocab 11.
fn decoder() -> Decoder {
    let block = |seed: u64| Block {
        attention_norm: linear(seed, 8, 1),
        query: linear(seed + 2, 24, 8),
        key: linear(seed + 4, 12, 8),
        value: linear(seed + 6, 12, 8),
        query_norm: None,
        key_norm: Some(linear(seed + 8, 6, 1)),
        out: linear(seed + 10, 8, 24),
        attention_post_norm: None,
        ffn_norm: linear(seed + 12, 8, 1),
        gate: Some(linear(seed + 14, 5, 8)),
        up: linear(seed + 16, 5, 8),
        down: linear(seed + 18, 8, 5),
        ffn_post_norm: Some(linear(seed + 20, 8, 1)),
        rotary: Some(rotary(Stretch::None)),
        window: None,
        scale: 0.5,
    };
    Decoder {
        hidden: 8,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        vocab: 11,
        embedding: fill(1, 11 * 8, Distribution::Normal),
        embedding_scale: 1.0,
        positions: None,
        blocks: vec![block(100), block(200)],
        norm_rule: NormRule::Rms,
        eps: 1e-6,
        final_norm: linear(3, 8, 1),
        head: None,
        activation: Activation::Silu,
        softcap: None,
        logit_softcap: None,
        stored: None,
    }
}

fn tokens() -> Vec<u32> {
    (0..SEQ as u32).map(|i| i * 7 % 11).collect()
}

fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-12)
}

#[test]
fn no_token_sees_what_follows() -> Result<(), Error> {
    for window in [None, Some(1), Some(3)] {
        let mut decoder = decoder();
        decoder.blocks[1].window = window;
        let whole = decoder.forward(&tokens())?;
        for len in 1..SEQ {
            let part = decoder.forward(&tokens()[..len])?;
            assert!(close(&part, &whole[..part.len()]), "{window:?} {len}");
        }
    }
    Ok(())
}

/// Two windows of 3 reach 4 positions back, not 5.
#[test]
fn windows_reach_as_far_as_they_say() -> Result<(), Error> {
    let mut decoder = decoder();
    decoder.blocks.iter_mut().for_each(|block| block.window = Some(3));
    let logits = decoder.forward(&tokens())?;
    let last = &logits[logits.len() - 11..];
    for (position, same) in [(SEQ - 6, true), (SEQ - 5, false)] {
        let mut other = tokens();
        other[position] = (other[position] + 1) % 11;
        let changed = decoder.forward(&other)?;
        assert_eq!(close(&changed[changed.len() - 11..], last), same, "{position}");
    }
    Ok(())
}

/// With a window of 1 a token attends only to itself: scores, rotation and soft caps have no effect.
#[test]
fn a_token_alone_takes_its_own_value() -> Result<(), Error> {
    let mut decoder = decoder();
    decoder.blocks.iter_mut().for_each(|block| block.window = Some(1));
    let logits = decoder.forward(&tokens())?;
    decoder.softcap = Some(0.1);
    decoder.blocks.iter_mut().for_each(|block| {
        block.rotary = None;
        block.scale = 7.0;
    });
    assert!(close(&decoder.forward(&tokens())?, &logits));
    for (at, token) in tokens().into_iter().enumerate() {
        assert!(close(&decoder.forward(&[token])?, &logits[at * 11..][..11]));
    }
    Ok(())
}

/// Scores depend only on the distance of two positions: Su et al., equation 16.
#[test]
fn rotations_are_relative() {
    let heads = [fill(5, 6, Distribution::Normal), fill(6, 6, Distribution::Normal)];
    let score = |stretch: &Stretch, [a, b]: [usize; 2]| {
        let rotated = |head: &[f32], position| {
            let mut head: Vec<f64> = head.iter().map(|value| f64::from(*value)).collect();
            rotary(stretch.clone()).rotate(&mut head, position, 40);
            head
        };
        let (a, b) = (rotated(&heads[0], a), rotated(&heads[1], b));
        a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>()
    };
    let stretches = [
        Stretch::None,
        Stretch::Linear(4.0),
        Stretch::Dynamic { factor: 2.0, trained: 16.0 },
        Stretch::Llama3 { factor: 8.0, slow: 1.0, fast: 4.0, trained: 64.0 },
        Stretch::Yarn { factor: 4.0, fast: 32.0, slow: 1.0, trained: 64.0, whole: true },
        Stretch::PerPair { short: vec![1.0, 1.0], long: vec![1.0, 3.0], trained: 16 },
    ];
    for (i, stretch) in stretches.iter().enumerate() {
        assert!((score(stretch, [3, 8]) - score(stretch, [20, 25])).abs() < 1e-12, "{stretch:?}");
        assert!((score(stretch, [3, 8]) - score(stretch, [3, 9])).abs() > 1e-3, "{stretch:?}");
        let others = stretches[..i].iter();
        assert!(others.clone().all(|o| (score(o, [3, 8]) - score(stretch, [3, 8])).abs() > 1e-4));
    }
}

#[test]
fn caps_bound_what_they_cap() -> Result<(), Error> {
    let mut decoder = decoder();
    let open = decoder.forward(&tokens())?;
    decoder.logit_softcap = Some(1.5);
    for (capped, open) in decoder.forward(&tokens())?.iter().zip(open) {
        assert!((capped - 1.5 * (open / 1.5).tanh()).abs() < 1e-12);
    }
    Ok(())
}

#[test]
fn learned_positions_end() -> Result<(), Error> {
    let mut decoder = decoder();
    decoder.positions = Some(fill(8, 4 * 8, Distribution::Normal));
    decoder.norm_rule = NormRule::Layer;
    decoder.forward(&[1, 2, 3, 4])?;
    let error = decoder.forward(&[1, 2, 3, 4, 5]).expect_err("four positions");
    assert_eq!(error, Error::OutOfRange { what: "position", index: 4, len: 4 });
    Ok(())
}

#[test]
fn what_is_wrong_is_named() {
    let check = |change: fn(&mut Decoder), expected: Error| {
        let mut decoder = decoder();
        change(&mut decoder);
        assert_eq!(decoder.forward(&[1]), Err(expected));
    };
    check(|d| d.kv_heads = 3, Error::Heads { heads: 4, kv_heads: 3 });
    check(|d| d.hidden = 0, Error::Length { what: "hidden", need: 1, have: 0 });
    check(
        |d| d.blocks[1].down.weight.push(0.0),
        Error::Length { what: "down", need: 40, have: 41 },
    );
    check(
        |d| d.blocks[0].key.bias = Some(vec![0.0; 11]),
        Error::Length { what: "key", need: 12, have: 11 },
    );
    check(
        |d| d.blocks[0].rotary = Some(Rotary { dims: 8, ..rotary(Stretch::None) }),
        Error::OutOfRange { what: "rotary dimension", index: 8, len: 6 },
    );
    let decoder = decoder();
    let token = Error::OutOfRange { what: "token", index: 11, len: 11 };
    assert_eq!(decoder.forward(&[11]), Err(token));
    let prompt = Error::Length { what: "prompt", need: 1, have: 0 };
    assert_eq!(decoder.greedy(&[], 1), Err(prompt));
    assert_eq!(decoder.greedy(&[1], 5).map(|tokens| tokens.len()), Ok(5));
}
