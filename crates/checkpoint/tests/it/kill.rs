//! Kills during a save: the files are the old ones or the new ones, and the next writer removes the remains.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use checkpoint::{DType, Plan, Staged, Tensor, Writer};

/// Environment variable that names the folder to the process that is killed.
const TARGET: &str = "FLASHOVER_SAVED_FOLDER";
const KILLS: u64 = 200;

/// Writes one generation: a config and weights that both contain its number.
fn save(folder: &mut Staged, generation: u32) {
    fs::write(folder.path().join("config.json"), generation.to_string()).expect("writable");
    let tensor = Tensor::new(DType::F32, &[5000], generation.to_le_bytes().repeat(5000));
    let plan = Plan::new("all", tensor.dtype, &tensor.shape);
    let file = folder.path().join("model.safetensors");
    let mut writer = Writer::create(file, vec![plan]).expect("writable");
    writer.write_all(&[("all".to_owned(), tensor)]).expect("room");
    writer.finish().expect("room");
    folder.publish().expect("nobody else writes it");
}

/// Checks that all files are of one generation and returns it; `None` if the config is missing, so that no program
/// reads the weights.
fn saved(folder: &Path) -> Option<u32> {
    let config = fs::read_to_string(folder.join("config.json")).ok()?;
    let file = checkpoint::Checkpoint::open(folder).expect("whole");
    let tensor = file.tensor("all").expect("it is there");
    let generation: u32 = config.parse().expect("whole");
    assert!(tensor.bytes.as_chunks::<4>().0.iter().all(|word| *word == generation.to_le_bytes()));
    Some(generation)
}

/// The process that is killed: saves one generation after another.
#[test]
fn saves_until_it_is_killed() {
    let Some(target) = std::env::var_os(TARGET) else { return };
    let mut folder = Staged::begin(target).expect("the one before is dead");
    for generation in 1.. {
        save(&mut folder, generation);
    }
}

#[test]
fn a_kill_leaves_the_old_folder_or_the_new_one() {
    let parent = tempfile::tempdir().expect("temporary folder");
    let target = parent.path().join("out");
    save(&mut Staged::begin(&target).expect("empty"), 0);
    let mut reached = 0;
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["kill::saves_until_it_is_killed", "--exact"])
            .env(TARGET, &target)
            .stdout(Stdio::null())
            .spawn()
            .expect("it runs");
        // Waits until it saves, then for any moment of the next few saves.
        let staging = target.join(".flashover-new");
        for _ in 0..10_000 {
            if staging.join("model.safetensors").exists() {
                break;
            }
            sleep(Duration::from_micros(500));
        }
        sleep(Duration::from_micros(kill * 7919 % 20_000));
        child.kill().expect("it has not ended");
        child.wait().expect("it is dead");
        // Another program sees the files before they are completed.
        saved(&target);
        checkpoint::recover(&target).expect("writable");
        let own = saved(&target).expect("there is always one");
        reached += u32::from(own > 0);
        drop(Staged::begin(&target).expect("nobody writes it"));
        let left = |folder: &Path| fs::read_dir(folder).expect("a folder").count();
        assert_eq!((left(parent.path()), left(&target)), (1, 2), "what a kill leaves is cleared");
    }
    assert!(reached > 100, "most kills came after a save: {reached}");
}
