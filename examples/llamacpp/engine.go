package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/hybridgroup/yzma/pkg/llama"
)

// engine runs one sequence at a time on llama.cpp. Requests take turns.
type engine struct {
	turn    sync.Mutex
	vocab   llama.Vocab
	context llama.Context
	memory  llama.Memory
	tokens  int // of the vocabulary
}

// openEngine loads llama.cpp from a directory of shared libraries, and a model.
// The model file stays memory-mapped.
func openEngine(libraries, model string, threads int) (*engine, error) {
	if err := llama.Load(libraries); err != nil {
		return nil, fmt.Errorf("llama.cpp in %s: %w", libraries, err)
	}
	llama.LogSet(llama.LogSilent())
	llama.Init()
	loaded, err := llama.ModelLoadFromFile(model, llama.ModelDefaultParams())
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", model, err)
	}
	parameters := llama.ContextDefaultParams()
	parameters.NCtx, parameters.NBatch = contextSize, contextSize
	parameters.NThreads, parameters.NThreadsBatch = int32(threads), int32(threads)
	c, err := llama.InitFromModel(loaded, parameters)
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", model, err)
	}
	memory, err := llama.GetMemory(c)
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", model, err)
	}
	vocab := llama.ModelGetVocab(loaded)
	return &engine{vocab: vocab, context: c, memory: memory, tokens: int(llama.VocabNTokens(vocab))}, nil
}

var errTooLong = errors.New("the prompt and the answer do not fit into the context")

// candidate is a token that could follow, with the logarithm of its probability.
type candidate struct {
	text    string
	logprob float64
}

// generate feeds the prompt to the model and hands each token it makes to emit,
// the likeliest first and the alternatives after it, until n are made, emit
// fails or ctx ends. It returns the length of the prompt in tokens.
func (e *engine) generate(ctx context.Context, prompt string, n, alternatives int, emit func([]candidate) error) (promptTokens int, err error) {
	e.turn.Lock()
	defer e.turn.Unlock()
	if err := llama.MemoryClear(e.memory, true); err != nil {
		return 0, err
	}
	next := llama.Tokenize(e.vocab, prompt, true, false)
	promptTokens = len(next)
	if promptTokens+n > contextSize {
		return promptTokens, errTooLong
	}
	for range n {
		if err := ctx.Err(); err != nil {
			return promptTokens, err
		}
		if status, err := llama.Decode(e.context, llama.BatchGetOne(next)); err != nil || status != 0 {
			return promptTokens, fmt.Errorf("llama_decode: status %d: %w", status, err)
		}
		logits, err := llama.GetLogitsIth(e.context, -1, e.tokens)
		if err != nil || len(logits) == 0 {
			return promptTokens, fmt.Errorf("no logits: %w", err)
		}
		token, ranked := e.rank(logits, max(1, alternatives))
		if err := emit(ranked); err != nil {
			return promptTokens, err
		}
		next = []llama.Token{token}
	}
	return promptTokens, nil
}

// rank returns the likeliest token and the n likeliest with their text.
func (e *engine) rank(logits []float32, n int) (llama.Token, []candidate) {
	order := make([]int, 0, n+1) // likeliest first
	var total float64
	for i, l := range logits {
		total += math.Exp(float64(l))
		at, _ := slices.BinarySearchFunc(order, l, func(j int, l float32) int { return cmp.Compare(l, logits[j]) })
		if at < n {
			order = slices.Insert(order, at, i)
			order = order[:min(n, len(order))]
		}
	}
	ranked := make([]candidate, len(order))
	buffer := make([]byte, 128)
	for i, token := range order {
		length := llama.TokenToPiece(e.vocab, llama.Token(token), buffer, 0, true)
		text := string(buffer[:max(0, length)])
		if !utf8.ValidString(text) {
			text = "\ufffd"
		}
		ranked[i] = candidate{text, float64(logits[token]) - math.Log(total)}
	}
	return llama.Token(order[0]), ranked
}
