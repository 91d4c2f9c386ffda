//! Any layout reads what any other wrote, and manifests that a hostile hand wrote.

use proptest::prelude::*;

use super::super::folder::MANIFEST;
use super::super::{Disk, ExportedTokenizer, Manifest, export, share_of};
use super::*;
use crate::model::Cut;

/// q, k and v of 2, 4 and 2 rows, or columns.
const STRETCHES: [usize; 3] = [2, 4, 2];

/// How a tensor of 8 × 8 × 3 is cut.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Whole,
    /// Two ranks cut this dimension, as one stretch or as three.
    Cut(usize, bool),
    /// Rows over two ranks, and columns over two.
    Grid,
}

const LAYOUTS: [Layout; 6] = [
    Layout::Whole,
    Layout::Cut(0, false),
    Layout::Cut(0, true),
    Layout::Cut(1, false),
    Layout::Cut(1, true),
    Layout::Grid,
];
const CUT: [usize; 3] = [8, 8, 3];

/// The regions of each rank.
fn regions(layout: Layout) -> Vec<Vec<Region>> {
    let half = |i: u64| [4 * i, 4 * i + 4];
    match layout {
        Layout::Whole => vec![vec![Region::whole(&[8, 8, 3])]],
        Layout::Cut(dim, is_fused) => {
            let stretches = if is_fused { STRETCHES.as_slice() } else { &[8] };
            let of = |index| Cut::new(&CUT, dim, stretches, index, 2).regions(&CUT);
            (0..2).map(of).collect()
        }
        Layout::Grid => (0..4)
            .map(|i| vec![Region::new(vec![half(i / 2), half(i % 2), [0, 3]])])
            .collect(),
    }
}

/// Elements of a box of the tensor.
fn read_box(reader: &Reader, region: &Region, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
    reader.read(&Extent {
        region: region.clone(),
        ..extent(parameter("w"), &[8, 8, 3], range)
    })
}

/// Element `number` of the whole tensor.
fn value(number: u64) -> [u8; 4] {
    (number as u32).wrapping_mul(2_654_435_761).to_le_bytes()
}

/// The elements of a range of a region.
fn content(region: &Region, range: Range<u64>) -> Vec<u8> {
    let bounds = region.bounds();
    let shape = region.shape();
    let number = |i: u64| {
        let index = [i / (shape[1] * shape[2]), i / shape[2] % shape[1], i % shape[2]];
        let whole = [8, 8, 3];
        (0..3).fold(0, |number, dim| number * whole[dim] + bounds[dim][0] + index[dim])
    };
    range.flat_map(|i| value(number(i))).collect()
}

fn cut_extent(region: &Region, range: Range<u64>) -> Extent {
    Extent {
        region: region.clone(),
        ..extent(parameter("w"), &[8, 8, 3], range)
    }
}

/// Saved by the ranks of a layout, each region's elements shared by so many more.
fn saved_as(layout: Layout, shards: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 1, 1).unwrap();
    let mut stems = Vec::new();
    for (rank, own) in regions(layout).iter().enumerate() {
        let ranges: Vec<Range<u64>> = own.iter().map(|region| 0..region.elements().unwrap()).collect();
        for shard in 0..shards {
            let extents: Vec<Extent> = share_of(&ranges, shard, shards)
                .into_iter()
                .map(|(i, range)| cut_extent(&own[i], range))
                .collect();
            let bytes: Vec<Vec<u8>> = extents
                .iter()
                .map(|e| content(&e.region, e.range.clone()))
                .collect();
            let pieces: Vec<(Extent, &[u8])> =
                extents.into_iter().zip(bytes.iter().map(Vec::as_slice)).collect();
            stems.push(format!("part-{rank}-{shard}"));
            writer.write(&stems[stems.len() - 1], &pieces).unwrap();
        }
    }
    writer.commit(&state(1), &stems).unwrap();
    folder
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_box_of_any_layout_is_read(
        wrote in prop::sample::select(&LAYOUTS[..]),
        shards in 1_usize..4,
        bounds in [(0_u64..8, 1_u64..9), (0_u64..8, 1_u64..9), (0_u64..3, 1_u64..4)],
        ends in any::<[prop::sample::Index; 2]>(),
    ) {
        let lens = [8, 8, 3];
        let bounds = bounds.iter().zip(lens).map(|(&(start, len), most)| [start, (start + len).min(most)]);
        let region = Region::new(bounds.collect());
        let [a, b] = ends.map(|end| end.index(region.elements().unwrap() as usize + 1) as u64);
        let range = a.min(b)..a.max(b);
        let folder = saved_as(wrote, shards);
        let reader = Reader::open(folder.path(), Which::Latest).unwrap();
        reader.verify().unwrap();
        let found = read_box(&reader, &region, range.clone()).unwrap();
        prop_assert_eq!(found, content(&region, range));
    }
}

#[test]
fn a_region_is_an_entry_of_its_own_shape() {
    let folder = saved_as(Layout::Cut(1, false), 1);
    let path = folder
        .path()
        .join("checkpoints/step_00000001/part-1-0.safetensors");
    let bytes = fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.names(), ["w[0..8, 4..8, 0..3]"]);
    assert_eq!(tensors.tensor("w[0..8, 4..8, 0..3]").unwrap().shape(), [8, 4, 3]);
}

#[test]
fn damage_in_a_region_is_named_with_the_region() {
    let folder = saved_as(Layout::Cut(1, false), 1);
    let path = folder
        .path()
        .join("checkpoints/step_00000001/part-1-0.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    // Rows that lie apart in the file.
    let error = reader.read_whole(&parameter("w")).unwrap_err();
    assert_eq!(error, reader.verify().unwrap_err());
    assert!(
        error
            .to_string()
            .contains("the content of tensor `w[0..8, 4..8, 0..3]`, elements 0..96, does not match"),
        "{error}"
    );
    let left = Region::new(vec![[0, 8], [0, 4], [0, 3]]);
    assert_eq!(read_box(&reader, &left, 0..96).unwrap(), content(&left, 0..96));
}

/// All hashes are right: the numbers would come back in other places.
#[test]
fn boxes_that_are_swapped_between_regions_are_refused() {
    let folder = saved_as(Layout::Cut(1, false), 1);
    let manifest = folder.path().join("checkpoints/step_00000001/manifest.json");
    let mut contents = Manifest::read(&manifest).unwrap();
    let [one, other] = &mut contents.tensors[0].regions[..2] else {
        panic!("one region");
    };
    std::mem::swap(&mut one.region, &mut other.region);
    fs::write(&manifest, contents.to_bytes().unwrap()).unwrap();
    let error = open_error(folder.path());
    let expected = "manifest.json` is damaged: entry `w[0..8, 4..8, 0..3]` of `part-1-0.safetensors` is listed as `w[0..8, 0..4, 0..3]`";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn what_is_no_box_of_the_tensor_is_not_read() {
    let folder = saved_as(Layout::Whole, 1);
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    for (bounds, range) in [
        (vec![[0, 8], [0, 8]], 0..64),
        (vec![[0, 8], [0, 9], [0, 3]], 0..1),
        (vec![[0, 8], [5, 4], [0, 3]], 0..0),
        (vec![[0, 2], [0, 2], [0, 2]], 0..9),
        (vec![[0, u64::MAX], [0, u64::MAX], [0, 3]], 0..1),
    ] {
        let region = Region::new(bounds);
        let found = read_box(&reader, &region, range);
        assert!(matches!(found, Err(CheckpointError::Misuse(_))), "{region}");
    }
}

#[test]
fn an_export_joins_regions() {
    let target = tempfile::tempdir().unwrap();
    let folder = saved_as(Layout::Grid, 2);
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let error = export(
        &Disk,
        &reader,
        &target.path().join("a"),
        &ExportedTokenizer::default(),
    )
    .unwrap_err();
    assert!(error.to_string().contains("describes no model"), "{error}");
    // As a model of whose parameters one was cut.
    let (source, wte) = cut_model();
    let reader = Reader::open(source.path(), Which::Latest).unwrap();
    let exported = target.path().join("b");
    export(&Disk, &reader, &exported, &ExportedTokenizer::default()).unwrap();
    let bytes = fs::read(exported.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("wte.weight").unwrap().data(), wte);
}

/// The checkpoint of an MLP whose embedding two ranks have cut by columns, and the embedding.
fn cut_model() -> (TempDir, Vec<u8>) {
    let config = serde_json::json!({
        "kind": "mlp", "n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 4, "vocab_size": 16
    });
    let model: crate::config::Model = crate::config::section("model", config.clone()).unwrap();
    let model = crate::model::build(&model, 1).unwrap();
    let rule = crate::optim::rule(&crate::config::OptimizerConfig::default());
    let mut extents = Vec::new();
    for kind in TensorKind::with_slots(rule.slots) {
        for spec in &model.params {
            let whole = Extent::whole(&kind, spec);
            if spec.key != "wte.weight" {
                extents.push(whole);
                continue;
            }
            for columns in [[0, 2], [2, 4]] {
                extents.push(Extent {
                    region: Region::new(vec![[0, 16], columns]),
                    range: 0..32,
                    ..whole.clone()
                });
            }
        }
    }
    // Element [i, j] of the embedding is 4 i + j.
    let number = |extent: &Extent, i: u64| match extent.region.bounds() {
        [_, columns] => i / (columns[1] - columns[0]) * 4 + columns[0] + i % (columns[1] - columns[0]),
        _ => i,
    };
    let bytes: Vec<Vec<u8>> = extents
        .iter()
        .map(|e| {
            e.range
                .clone()
                .flat_map(|i| (number(e, i) as f32).to_le_bytes())
                .collect()
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 1, 1).unwrap();
    let pieces: Vec<(Extent, &[u8])> = extents.into_iter().zip(bytes.iter().map(Vec::as_slice)).collect();
    writer.write("all", &pieces).unwrap();
    let state = State {
        config: serde_json::json!({ "model": config }),
        ..state(1)
    };
    writer.commit(&state, &["all"]).unwrap();
    (folder, (0..64).flat_map(|i| (i as f32).to_le_bytes()).collect())
}

/// Replaces the manifest by one with the right hash of its own; the error of opening it.
fn refused(folder: &Path, bad: &Manifest) -> String {
    let path = folder.join("checkpoints/step_00000001").join(MANIFEST);
    fs::write(&path, bad.to_bytes().unwrap()).unwrap();
    let error = open_error(folder);
    assert!(error.contains("manifest.json` is damaged"), "{error}");
    error
}

fn four_regions() -> (TempDir, Manifest) {
    let folder = saved_as(Layout::Grid, 1);
    let path = folder.path().join("checkpoints/step_00000001").join(MANIFEST);
    let manifest = Manifest::read(&path).unwrap();
    (folder, manifest)
}

/// All ways to contradict itself are in `manifest_tests.rs`.
#[test]
fn manifests_whose_regions_contradict_themselves_are_refused() {
    let (folder, good) = four_regions();
    let (mut wider, mut shorter) = (good.clone(), good);
    wider.tensors[0].regions[0].region = Region::new(vec![[0, 4], [0, 5], [0, 3]]);
    shorter.tensors[0].regions[1].ranges[0].start = 1;
    for (bad, said) in [
        (wider, "element [0, 4, 0] is in more than one region"),
        (
            shorter,
            "elements 0..1 of region [0..4, 4..8, 0..3] are in no file",
        ),
    ] {
        let error = refused(folder.path(), &bad);
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn manifests_with_another_shape_or_a_tensor_twice_are_refused() {
    let (folder, good) = four_regions();
    let max = u64::MAX;
    for shape in [[max, max, 3], [8, 8, max], [0, 8, 3], [8, 8, 4]] {
        let mut bad = good.clone();
        bad.tensors[0].shape = shape.to_vec();
        refused(folder.path(), &bad);
    }
    let mut bad = good.clone();
    bad.tensors.push(good.tensors[0].clone());
    assert!(refused(folder.path(), &bad).contains("it has tensor `w` twice"));
}
