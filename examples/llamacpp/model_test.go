package main

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"
)

func TestFloat16(t *testing.T) {
	for f, want := range map[float32]uint16{
		0: 0, 1: 0x3c00, -2: 0xc000, 0.5: 0x3800, 1.0 / 3: 0x3555,
		6.1035156e-05: 0x0400, // the smallest normal one
		1e-6:          0,
		1e6:           0x7bff,
	} {
		if got := float16(f); got != want {
			t.Errorf("float16(%v) = %#04x, want %#04x", f, got, want)
		}
	}
	if got := float16(float32(math.Copysign(0, -1))); got != 0x8000 {
		t.Errorf("float16(-0) = %#04x", got)
	}
}

func TestVocabularyIsFullAndHasNoTokenTwice(t *testing.T) {
	pieces, kinds := vocabulary()
	if len(pieces) != vocabSize || len(kinds) != vocabSize {
		t.Fatalf("%d pieces and %d kinds, want %d", len(pieces), len(kinds), vocabSize)
	}
	seen := map[string]bool{}
	for _, p := range pieces {
		if seen[p] {
			t.Errorf("%q is there twice", p)
		}
		seen[p] = true
	}
}

func TestGeneratedModelHoldsEveryTensor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.gguf")
	if err := generateModel(path); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(data[:4]) != "GGUF" || binary.LittleEndian.Uint32(data[4:]) != 3 {
		t.Fatalf("begins with %x", data[:8])
	}
	all := tensors()
	if n := binary.LittleEndian.Uint64(data[8:]); n != uint64(len(all)) {
		t.Errorf("%d tensors, want %d", n, len(all))
	}
	var weights uint64
	for _, tensor := range all {
		weights += (tensor.size() + alignment - 1) / alignment * alignment
	}
	head := uint64(len(data)) - weights
	if len(data)%alignment != 0 || head == 0 || head > 1<<20 {
		t.Errorf("%d bytes of which %d are weights", len(data), weights)
	}
	// A norm's ones stand right behind the embeddings.
	if one := binary.LittleEndian.Uint32(data[head+all[0].size():]); one != math.Float32bits(1) {
		t.Errorf("the first norm begins with %#x", one)
	}
}
