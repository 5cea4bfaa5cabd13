package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/ebpfllm/ebpfllm/internal/dbscan"
)

//go:embed sklearn_agree.py
var agreeScript string

// randomCase is a small clustering problem for both implementations.
type randomCase struct {
	Dims       int     `json:"dims"`
	N          int     `json:"n"`
	Eps        float64 `json:"eps"`
	MinSamples int     `json:"min_samples"`
	points     []float64
}

// randomCases are problems on 1 to 4 axes, half of them on a coarse lattice,
// where ties and duplicates abound.
func randomCases(n int) []randomCase {
	r := rand.New(rand.NewPCG(12, 34))
	cases := make([]randomCase, n)
	for i := range cases {
		c := &cases[i]
		c.Dims, c.N = 1+r.IntN(4), 1+r.IntN(400)
		c.Eps, c.MinSamples = []float64{0.5, 0.8, 1, math.Sqrt2, 2}[r.IntN(5)], 1+r.IntN(9)
		spread := 1 + 19*r.Float64()
		centre := make([]float64, c.Dims)
		for range c.N {
			for k := range c.Dims {
				if r.IntN(30) == 0 {
					centre[k] = spread * r.Float64()
				}
				x := centre[k] + 0.4*r.NormFloat64()
				if r.IntN(3) == 0 {
					x = spread * r.Float64()
				}
				if i%2 == 0 {
					x = math.Round(4*x) / 4
				}
				c.points = append(c.points, x)
			}
		}
	}
	return cases
}

// measureAgreement compares labels and core flags with scikit-learn's on 1,000
// random cases.
func measureAgreement(ctx context.Context, rep *report) error {
	const name = "dbscan, random cases with labels equal to the letter"
	if out, err := exec.CommandContext(ctx, python, "-c", "import sklearn.cluster").CombinedOutput(); err != nil {
		rep.LeftOut = append(rep.LeftOut, leftOut{name, fmt.Sprintf("scikit-learn is not installed (Debian: python3-sklearn): %s", lastLine(out, err))})
		return nil
	}
	dir, err := os.MkdirTemp("", "ebpfllm-bench-")
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer os.RemoveAll(dir)

	cases := randomCases(1000)
	var points []float64
	for i := range cases {
		points = append(points, cases[i].points...)
	}
	head, err := json.Marshal(cases)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	casesFile, pointsFile, labelsFile := filepath.Join(dir, "cases"), filepath.Join(dir, "points"), filepath.Join(dir, "labels")
	if err := errors.Join(os.WriteFile(casesFile, head, 0o600), writeFloats(pointsFile, points)); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if out, err := exec.CommandContext(ctx, python, "-c", agreeScript, casesFile, pointsFile, labelsFile).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: scikit-learn: %w: %s", name, err, lastLine(out, err))
	}
	theirs, err := os.ReadFile(labelsFile)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for i, c := range cases {
		res, err := dbscan.Cluster(c.points, c.Dims, c.Eps, c.MinSamples)
		if err != nil {
			return fmt.Errorf("%s: case %d: %w", name, i, err)
		}
		ours := labelBytes(res)
		if len(theirs) < len(ours) || !bytes.Equal(ours, theirs[:len(ours)]) {
			return fmt.Errorf("%s: case %d (%d points on %d axes, eps %v, min_samples %d) differs", name, i, c.N, c.Dims, c.Eps, c.MinSamples)
		}
		theirs = theirs[len(ours):]
	}
	rep.Rows = append(rep.Rows, row{Name: name, Subject: "ebpfllm", Value: float64(len(cases)), Unit: "cases", Note: "of as many"})
	return nil
}

// labelBytes is one int32 for each point and then one byte for its core flag.
func labelBytes(res dbscan.Result) []byte {
	var b []byte
	for _, l := range res.Labels {
		b = binary.LittleEndian.AppendUint32(b, uint32(l))
	}
	for _, core := range res.Core {
		if core {
			b = append(b, 1)
		} else {
			b = append(b, 0)
		}
	}
	return b
}
