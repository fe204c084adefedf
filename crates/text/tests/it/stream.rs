use proptest::prelude::*;
use text::{Error, Stops, Stream, Tokenizer};

use crate::{FIXTURES, golden, tokenizer};

/// Streams ids after a prompt and returns the pieces.
fn pieces(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> Result<Vec<String>, Error> {
    let mut stream = Stream::new(prompt, false);
    let pieces: Result<Vec<_>, _> = ids.iter().map(|id| stream.push(tokenizer, *id)).collect();
    let mut pieces = pieces?;
    pieces.push(stream.finish(tokenizer)?);
    Ok(pieces)
}

#[test]
fn pieces_join_to_the_text_wherever_a_prompt_ends() -> Result<(), Error> {
    for name in FIXTURES {
        let tokenizer = tokenizer(name);
        for case in golden(name).encoded {
            let ids = &case.special_ids;
            for cut in 0..=ids.len() {
                let pieces = pieces(&tokenizer, &ids[..cut], &ids[cut..])?;
                // The prompt may end within a character; only its complete text counts.
                let before = tokenizer.decode(&ids[..cut], false)?;
                let before = before.trim_end_matches('\u{FFFD}');
                assert_eq!(format!("{before}{}", pieces.concat()), case.decoded, "{name} at {cut}");
                assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn words_come_as_their_tokens_do() -> Result<(), Error> {
    let tokenizer = tokenizer("pieces");
    let ids = tokenizer.encode("The dog and the fox", false)?;
    let tokens: Vec<_> = ids.iter().map(|id| tokenizer.token(*id).expect("named")).collect();
    let shown: Vec<_> = tokens.iter().map(|token| token.replace('▁', " ")).collect();
    let streamed = pieces(&tokenizer, &[], &ids)?;
    assert_eq!(streamed[0], shown[0].trim_start());
    assert_eq!(streamed[1..shown.len()], shown[1..]);
    // After other words the first word keeps its space.
    let after = pieces(&tokenizer, &ids, &ids)?;
    assert_eq!(after[..shown.len()], shown);
    Ok(())
}

#[test]
fn special_tokens_are_nothing_or_their_names() -> Result<(), Error> {
    let tokenizer = tokenizer("pieces");
    let dog = tokenizer.encode("dog", false)?;
    let end = tokenizer.id("</s>").expect("there");
    let ids = [&dog[..], &[end, end], &dog[..]].concat();
    assert_eq!(pieces(&tokenizer, &[], &ids)?.concat(), "dog dog");
    let mut stream = Stream::new(&dog, true);
    assert_eq!(stream.push(&tokenizer, end)?, "</s>");
    Ok(())
}

/// An invalid first byte is shown once no further byte can complete it.
#[test]
fn bytes_that_are_no_text_do_not_dam_the_stream() -> Result<(), Error> {
    let tokenizer = tokenizer("pieces");
    let byte = |byte: u8| tokenizer.id(&format!("<0x{byte:02X}>")).expect("every byte");
    let dog = tokenizer.encode("dog", false)?;
    let mut stream = Stream::new(&dog, false);
    let mut shown = String::new();
    for _ in 0..12 {
        shown.push_str(&stream.push(&tokenizer, byte(0xFF))?);
    }
    assert_eq!(shown, "\u{FFFD}".repeat(12 - 3));
    shown.push_str(&stream.push(&tokenizer, dog[0])?);
    let ids = [&dog[..], &[byte(0xFF); 12], &dog[..1]].concat();
    assert_eq!(format!("dog{shown}{}", stream.finish(&tokenizer)?), tokenizer.decode(&ids, false)?);
    // Complete characters stay when an invalid byte follows.
    let crab = tokenizer.encode("🦀", false)?;
    let broken = [&crab[..], &[byte(0xFF); 2], &dog[..]].concat();
    assert_eq!(pieces(&tokenizer, &[], &broken)?.concat(), "🦀\u{FFFD}\u{FFFD} dog");
    // A character that is never completed.
    let mut stream = Stream::new(&dog, false);
    assert_eq!(stream.push(&tokenizer, byte(0xF0))?, "");
    assert_eq!(stream.push(&tokenizer, byte(0x9F))?, "");
    assert!(stream.finish(&tokenizer)?.starts_with('\u{FFFD}'));
    Ok(())
}

/// Several ids without a token, with characters around them.
#[test]
fn ids_of_no_token_are_shown() -> Result<(), Error> {
    for name in FIXTURES {
        let tokenizer = tokenizer(name);
        let no = tokenizer.tokens() as u32;
        let dog = tokenizer.encode("dog", false)?;
        let text = |ids: &[&[u32]], prompt: &[u32]| {
            pieces(&tokenizer, prompt, &ids.concat()).map(|pieces| pieces.concat().replace(' ', ""))
        };
        assert_eq!(text(&[&dog, &[no], &dog], &[])?, "dog\u{FFFD}dog", "{name}");
        assert_eq!(text(&[&[no; 5]], &dog)?, "\u{FFFD}".repeat(5), "{name}");
        assert_eq!(text(&[&dog, &[no]], &[no])?, "dog\u{FFFD}", "{name}");
        let crab = tokenizer.encode("🦀", false)?;
        assert_eq!(text(&[&[no], &crab, &[no]], &dog)?, "\u{FFFD}🦀\u{FFFD}", "{name}");
    }
    Ok(())
}

/// The context from the prompt begins within a character and consists of byte tokens only.
#[test]
fn a_prompt_of_bytes_is_no_hindrance() -> Result<(), Error> {
    let tokenizer = tokenizer("pieces");
    let prompt = tokenizer.encode(&"€".repeat(50), false)?;
    let more = &prompt[prompt.len() - 6..];
    assert_eq!(prompt.len(), 151, "a space, and three bytes each");
    assert_eq!(pieces(&tokenizer, &prompt, more)?.concat(), "€€");
    Ok(())
}

/// Tokens that end one character and begin the next: each character is returned as soon as it is complete.
#[test]
fn characters_do_not_wait_for_the_next() -> Result<(), Error> {
    let tokenizer = tokenizer("bytes");
    let ids = tokenizer.encode("€", false)?;
    assert_eq!(ids.len(), 3);
    let mut stream = Stream::new(&[], false);
    let mut shown = Vec::new();
    for id in [&ids[..], &ids[..1], &ids[1..], &ids[..2]].concat() {
        shown.push(stream.push(&tokenizer, id)?);
    }
    assert_eq!(shown, ["", "", "€", "", "", "€", "", ""]);
    assert_eq!(stream.finish(&tokenizer)?, "\u{FFFD}");
    Ok(())
}

#[test]
fn the_stop_that_is_whole_first_wins() -> Result<(), Error> {
    let run = |stops: &[&str], pushed: &[&str]| {
        let mut all = Stops::new(stops.iter().copied())?;
        let mut shown = Vec::new();
        for text in pushed {
            let piece = all.push(text);
            shown.push(piece.text);
            if piece.stop.is_some() {
                return Ok::<_, Error>((shown, piece.stop));
            }
        }
        shown.push(all.finish());
        Ok((shown, None))
    };
    let owned = |text: &[&str]| text.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    for (stops, pushed, shown, stop) in [
        (&["\n\n"][..], &["a\n", "b\n", "\nc"][..], &["a", "\nb", ""][..], Some(0)),
        (&["abc", "b"], &["xab"], &["xa"], Some(1)),
        (&["bc", "abc"], &["xa", "bc"], &["x", ""], Some(1)),
        (&["aab"], &["a", "a", "a", "b"], &["", "", "a", ""], Some(0)),
        (&["aab"], &["a", "a"], &["", "", "aa"], None),
        (&["ende", "größe"], &["grö", "ß", "er"], &["", "", ""], Some(1)),
        (&["ende", "größe"], &["grö", "ß", "t"], &["", "", "größt", ""], None),
        (&["日本"], &["日", "本語"], &["", ""], Some(0)),
        (&[], &["a", "b"], &["a", "b", ""], None),
    ] {
        let (have, stopped) = run(stops, pushed)?;
        assert_eq!(stopped, stop, "{stops:?} {pushed:?}");
        assert_eq!(have, owned(shown), "{stops:?} {pushed:?}");
    }
    assert!(matches!(Stops::new(["a", ""]), Err(Error::EmptyStop)));
    Ok(())
}

proptest! {
    /// The shown text does not depend on the pieces, and never contains a stop sequence.
    #[test]
    fn cuts_change_nothing(
        text in "[ab]{0,12}",
        stops in proptest::collection::vec("[ab]{1,3}", 1..4),
        cuts in proptest::collection::vec(0usize..13, 0..5),
    ) {
        let run = |parts: &[&str]| {
            let mut all = Stops::new(stops.clone()).expect("none is empty");
            let mut shown = String::new();
            for part in parts {
                let piece = all.push(part);
                shown.push_str(&piece.text);
                if piece.stop.is_some() {
                    return (shown, piece.stop);
                }
            }
            shown.push_str(&all.finish());
            (shown, None)
        };
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let parts: Vec<_> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        let (shown, stop) = run(&parts);
        prop_assert_eq!(&(shown.clone(), stop), &run(&[&text]));
        prop_assert!(text.starts_with(&shown));
        prop_assert!(stops.iter().all(|stop| !shown.contains(stop.as_str())));
        match stop {
            Some(stop) => prop_assert!(text[shown.len()..].starts_with(&stops[stop])),
            None => prop_assert_eq!(shown, text),
        }
    }

    /// For any ids, the joined pieces are the text. Invalid bytes are skipped for `pieces`, which then replaces
    /// characters that were complete before.
    #[test]
    fn any_ids_stream_to_their_text(ids in proptest::collection::vec(0u32..430, 0..24)) {
        for name in FIXTURES {
            let tokenizer = tokenizer(name);
            let streamed = pieces(&tokenizer, &[], &ids).expect("decodable").concat();
            let text = tokenizer.decode(&ids, false).expect("decodable");
            if name == "pieces" && text.contains('\u{FFFD}') {
                continue;
            }
            prop_assert_eq!(streamed, text, "{}", name);
        }
    }
}
