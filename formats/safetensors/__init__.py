"""Files of safetensors, alone and in the folders of Hugging Face."""
