package main

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
)

const (
	width      = 64            // numbers in a hidden state, and tokens in the vocabulary
	matrixSize = width * width // bytes: one page
	loops      = 3             // times a state passes through each matrix: CPU time for the same memory
)

// model is a mixture of experts. Each expert is one page of the weights, a
// 64×64 matrix of signed bytes; at each layer the hidden state itself routes
// the token to one of them.
type model struct {
	weights []byte
	experts uint64
	layers  int
}

// state is what a sequence has come to: the hidden state after its last token.
type state [width]int8

func newModel(weights []byte, layers int) (*model, error) {
	if layers < 1 || layers > 4096 {
		return nil, fmt.Errorf("-layers %d: must be between 1 and 4096", layers)
	}
	if len(weights) < matrixSize {
		return nil, errors.New("weights are smaller than one matrix")
	}
	return &model{weights: weights, experts: uint64(len(weights) / matrixSize), layers: layers}, nil
}

// forward feeds one word to the sequence: its embedding is added to the hidden
// state, which then passes through every layer.
func (m *model) forward(s *state, word string) {
	h := fnv.New64a()
	h.Write([]byte(word))
	embedding := h.Sum64()
	for i := range s {
		s[i] += int8(embedding >> (i % 8 * 8))
	}
	for range m.layers {
		expert := m.expert(m.route(s))
		for range loops {
			s.multiply(expert)
		}
	}
}

// route picks the expert for a hidden state.
func (m *model) route(s *state) uint64 {
	h := uint64(14695981039346656037)
	for _, x := range s {
		h = (h ^ uint64(uint8(x))) * 1099511628211
	}
	return h % m.experts
}

func (m *model) expert(i uint64) *[matrixSize]byte {
	return (*[matrixSize]byte)(m.weights[i*matrixSize:])
}

// multiply replaces the state by matrix·state, scaled back to signed bytes.
func (s *state) multiply(matrix *[matrixSize]byte) {
	var out state
	for row := range out {
		var sum int32
		line := (*[width]byte)(matrix[row*width:])
		for col, w := range line {
			sum += int32(int8(w)) * int32(s[col])
		}
		// A sum of 64 products of such numbers spreads over about ±2¹⁶.
		out[row] = int8(max(-127, min(127, sum>>9)))
	}
	*s = out
}

// candidate is a token that could follow, with the logarithm of its probability.
type candidate struct {
	token   string
	logprob float64
}

// candidates ranks the vocabulary for a hidden state, likeliest first.
func (s *state) candidates() []candidate {
	var total float64
	list := make([]candidate, width)
	for i, x := range s {
		logit := float64(x) / 16
		total += math.Exp(logit)
		list[i] = candidate{token: vocabulary[i], logprob: logit}
	}
	for i := range list {
		list[i].logprob -= math.Log(total)
	}
	slices.SortStableFunc(list, func(a, b candidate) int { return cmp.Compare(b.logprob, a.logprob) })
	return list
}

var vocabulary = strings.Fields(`the a of and to in is that it for on with as at by from this these one two
	wind water stone light river field house road door hand eye word name song book night day year time hour
	goes comes stands falls opens turns holds waits grows sings runs burns old new small deep bright slow warm
	still never always again softly`)
