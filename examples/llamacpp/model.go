package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
)

// The shape of the generated model: a llama of 80 MB.
const (
	layers      = 12
	width       = 512
	feedForward = 1536
	heads       = 8
	kvHeads     = 4
	headSize    = width / heads
	vocabSize   = 2048
	contextSize = 4096
)

// Value and tensor types of GGUF version 3.
const (
	typeUint32  = 4
	typeInt32   = 5
	typeFloat32 = 6
	typeBool    = 7
	typeString  = 8
	typeArray   = 9

	tensorF32 = 0
	tensorF16 = 1

	alignment = 32
)

// Token types of a SentencePiece vocabulary.
const (
	tokenNormal  = 1
	tokenUnknown = 2
	tokenControl = 3
	tokenByte    = 6
)

// generateModel writes a GGUF file of a llama with random weights, always the
// same. What it says means nothing; computing it costs what it costs.
func generateModel(path string) error {
	temporary := path + ".part"
	file, err := os.Create(temporary)
	if err != nil {
		return err
	}
	defer file.Close()
	g := &gguf{w: bufio.NewWriterSize(file, 1<<20), random: rand.New(rand.NewPCG(1, 2))}
	g.write()
	if g.err == nil {
		g.err = g.w.Flush()
	}
	if g.err == nil {
		g.err = file.Sync() // dirty pages cannot leave the page cache
	}
	if g.err != nil {
		return fmt.Errorf("write %s: %w", temporary, g.err)
	}
	return os.Rename(temporary, path)
}

// gguf writes the format's parts in order. After an error it writes no more.
type gguf struct {
	w      *bufio.Writer
	n      int64
	err    error
	random *rand.Rand
}

type tensor struct {
	name  string
	shape []uint64 // the innermost dimension first
	kind  uint32
}

func (t tensor) size() (bytes uint64) {
	bytes = 2
	if t.kind == tensorF32 {
		bytes = 4
	}
	for _, d := range t.shape {
		bytes *= d
	}
	return bytes
}

func tensors() []tensor {
	all := []tensor{
		{"token_embd.weight", []uint64{width, vocabSize}, tensorF16},
		{"output_norm.weight", []uint64{width}, tensorF32},
		{"output.weight", []uint64{width, vocabSize}, tensorF16},
	}
	for i := range layers {
		block := fmt.Sprintf("blk.%d.", i)
		all = append(all,
			tensor{block + "attn_norm.weight", []uint64{width}, tensorF32},
			tensor{block + "attn_q.weight", []uint64{width, width}, tensorF16},
			tensor{block + "attn_k.weight", []uint64{width, headSize * kvHeads}, tensorF16},
			tensor{block + "attn_v.weight", []uint64{width, headSize * kvHeads}, tensorF16},
			tensor{block + "attn_output.weight", []uint64{width, width}, tensorF16},
			tensor{block + "ffn_norm.weight", []uint64{width}, tensorF32},
			tensor{block + "ffn_gate.weight", []uint64{width, feedForward}, tensorF16},
			tensor{block + "ffn_up.weight", []uint64{width, feedForward}, tensorF16},
			tensor{block + "ffn_down.weight", []uint64{feedForward, width}, tensorF16},
		)
	}
	return all
}

func (g *gguf) write() {
	pieces, kinds := vocabulary()
	scores := make([]float32, len(pieces))
	for i := range scores {
		if kinds[i] == tokenNormal {
			scores[i] = -float32(i)
		}
	}
	values := []struct {
		key   string
		value any
	}{
		{"general.architecture", "llama"},
		{"general.name", "tiny-random"},
		{"general.file_type", uint32(1)},
		{"llama.vocab_size", uint32(vocabSize)},
		{"llama.context_length", uint32(contextSize)},
		{"llama.embedding_length", uint32(width)},
		{"llama.block_count", uint32(layers)},
		{"llama.feed_forward_length", uint32(feedForward)},
		{"llama.rope.dimension_count", uint32(headSize)},
		{"llama.attention.head_count", uint32(heads)},
		{"llama.attention.head_count_kv", uint32(kvHeads)},
		{"llama.attention.layer_norm_rms_epsilon", float32(1e-5)},
		{"llama.rope.freq_base", float32(10000)},
		{"tokenizer.ggml.model", "llama"},
		{"tokenizer.ggml.tokens", pieces},
		{"tokenizer.ggml.scores", scores},
		{"tokenizer.ggml.token_type", kinds},
		{"tokenizer.ggml.unknown_token_id", uint32(0)},
		{"tokenizer.ggml.bos_token_id", uint32(1)},
		{"tokenizer.ggml.eos_token_id", uint32(2)},
		{"tokenizer.ggml.add_bos_token", true},
	}
	all := tensors()
	g.bytes([]byte("GGUF"))
	g.number(uint32(3))
	g.number(uint64(len(all)))
	g.number(uint64(len(values)))
	for _, v := range values {
		g.string(v.key)
		g.value(v.value)
	}
	var offset uint64
	for _, t := range all {
		g.string(t.name)
		g.number(uint32(len(t.shape)))
		for _, d := range t.shape {
			g.number(d)
		}
		g.number(t.kind)
		g.number(offset)
		offset += (t.size() + alignment - 1) / alignment * alignment
	}
	g.align()
	for _, t := range all {
		g.tensor(t, kinds)
		g.align()
	}
}

// tensor writes weights: ones for a norm, else normally distributed. In the
// output layer all tokens but the normal ones get zeros, so that they are never
// the likeliest and the model does not end early or speak half characters.
func (g *gguf) tensor(t tensor, kinds []int32) {
	for i := range t.shape[len(t.shape)-1] {
		switch {
		case t.kind == tensorF32:
			g.number(float32(1))
		case t.name == "output.weight" && kinds[i] != tokenNormal:
			g.bytes(make([]byte, 2*t.shape[0]))
		default:
			row := make([]byte, 0, 2*t.shape[0])
			for range t.shape[0] {
				row = binary.LittleEndian.AppendUint16(row, float16(float32(g.random.NormFloat64()*0.04)))
			}
			g.bytes(row)
		}
	}
}

func (g *gguf) value(v any) {
	switch v := v.(type) {
	case uint32:
		g.number(uint32(typeUint32))
		g.number(v)
	case float32:
		g.number(uint32(typeFloat32))
		g.number(v)
	case bool:
		g.number(uint32(typeBool))
		g.number(v)
	case string:
		g.number(uint32(typeString))
		g.string(v)
	case []string:
		g.array(typeString, len(v))
		for _, s := range v {
			g.string(s)
		}
	case []float32:
		g.array(typeFloat32, len(v))
		g.number(v)
	case []int32:
		g.array(typeInt32, len(v))
		g.number(v)
	}
}

func (g *gguf) array(kind uint32, n int) {
	g.number(uint32(typeArray))
	g.number(kind)
	g.number(uint64(n))
}

func (g *gguf) string(s string) {
	g.number(uint64(len(s)))
	g.bytes([]byte(s))
}

// number writes a number of fixed size, or a slice of them.
func (g *gguf) number(v any) {
	if g.err == nil {
		g.err = binary.Write(counter{g}, binary.LittleEndian, v)
	}
}

func (g *gguf) bytes(b []byte) {
	if g.err == nil {
		_, g.err = counter{g}.Write(b)
	}
}

func (g *gguf) align() {
	g.bytes(make([]byte, (alignment-g.n%alignment)%alignment))
}

// counter counts what goes to the file.
type counter struct{ g *gguf }

var _ io.Writer = counter{}

func (c counter) Write(b []byte) (int, error) {
	n, err := c.g.w.Write(b)
	c.g.n += int64(n)
	return n, err
}

// float16 converts a number to half precision, rounding towards zero; numbers
// below 2⁻¹⁴ become zero.
func float16(f float32) uint16 {
	bits := math.Float32bits(f)
	sign := uint16(bits >> 16 & 0x8000)
	exponent := int(bits>>23&0xff) - 127 + 15
	switch {
	case exponent <= 0:
		return sign
	case exponent >= 31:
		return sign | 0x7bff // the largest finite one
	}
	return sign | uint16(exponent)<<10 | uint16(bits>>13&0x3ff)
}

// vocabulary makes SentencePiece tokens: the special ones, one for each byte,
// ASCII and words of up to three syllables.
func vocabulary() (pieces []string, kinds []int32) {
	seen := map[string]bool{}
	add := func(piece string, kind int32) {
		if !seen[piece] && len(pieces) < vocabSize {
			seen[piece] = true
			pieces, kinds = append(pieces, piece), append(kinds, kind)
		}
	}
	add("<unk>", tokenUnknown)
	add("<s>", tokenControl)
	add("</s>", tokenControl)
	for b := range 256 {
		add(fmt.Sprintf("<0x%02X>", b), tokenByte)
	}
	const space = "▁" // how SentencePiece writes one
	add(space, tokenNormal)
	for c := '!'; c <= '~'; c++ {
		add(string(c), tokenNormal)
	}
	var syllables []string
	for _, consonant := range "bcdfghjklmnprstvwz" {
		for _, vowel := range "aeiou" {
			syllables = append(syllables, string(consonant)+string(vowel))
		}
	}
	for _, a := range syllables {
		add(a, tokenNormal)
		add(space+a, tokenNormal)
	}
	for _, a := range syllables {
		for _, b := range syllables {
			add(space+a+b, tokenNormal)
		}
	}
	return pieces, kinds
}
