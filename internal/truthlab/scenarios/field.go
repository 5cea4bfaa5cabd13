package scenarios

import "github.com/ebpfllm/ebpfllm/internal/truthlab/lab"

func field() []lab.Scenario { return nil }
